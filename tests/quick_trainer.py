"""A silent Trainer."""

from lightning.pytorch import Trainer


def quick_trainer(**options):
    """Return a Trainer on the CPU without bar, logger, checkpoints and summary; further options are Lightning's."""
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, use_distributed_sampler=False, **options,
    )  # fmt: skip
