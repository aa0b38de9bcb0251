"""Options of runs that take seconds."""

from pathlib import Path


def small_run(root: Path, runs: Path, *more: str, recipe: str = "clip4clip") -> list[str]:
    """Options of a small model without an audit; it trains six steps in two epochs on 16 synthetic videos."""
    return [
        f"--config={recipe}", "--config=fixture", f"--data.init_args.root={root}", "--data.init_args.batch_size=4",
        "--data.init_args.num_workers=0", "--data.init_args.frames=2", f"--results.directory={runs}",
        "--model.init_args.encoder.init_args.width=64", "--model.init_args.encoder.init_args.vision_layers=1",
        "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1", "--trainer.accelerator=cpu",
        "--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false",
        "--model.init_args.evaluation.audit=0", *more,
    ]  # fmt: skip
