"""Trainer precisions that would train a method's layers in 16 bits are refused before data or weights are read."""

import logging
from pathlib import Path

import lightning.pytorch as pl
import pytest

from tvr_lightning.cli import main
from tvr_lightning.data import MSRVTT
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.testing.small import method_recipes, synthetic_data

RECIPES = method_recipes(Path(__file__).parents[2] / "recipes")
SENTENCE = "trainer.precision {} stores all weights in 16 bits, but methods score in float32. Use bf16-mixed or 32-true"


def refused(capsys, words: list[str], precision: str) -> bool:
    status = main([*words, f"--trainer.precision={precision}"])
    return (status, capsys.readouterr().err) == (2, f"tvr: {SENTENCE.format(precision)}\n")


@pytest.mark.parametrize("recipe", [*RECIPES.values(), "dpdv-vqa"])
def test_every_method_refuses_half_precision_weights(recipe, tmp_path, capsys):
    # The folder contains no data and no weights, so anything that was read first would be the error.
    assert refused(capsys, ["fit", f"--config={recipe}", f"--data.init_args.root={tmp_path}"], "bf16-true")


@pytest.mark.parametrize("precision", ["16-true", "transformer-engine", "transformer-engine-float16"])
def test_so_does_every_other_precision_with_such_weights(tmp_path, capsys, precision):
    words = ["--config=clip4clip", f"--data.init_args.root={tmp_path}"]
    assert refused(capsys, ["fit", *words], precision)
    assert refused(capsys, ["fit", "--estimate", *words], precision)
    assert refused(capsys, ["test", *words], precision)
    assert refused(capsys, ["profile", "--config=clip4clip", f"--out={tmp_path}"], precision)


def test_python_is_refused_the_same():
    data = MSRVTT(root=synthetic_data(), frames=2, batch_size=2, num_workers=0)
    trainer = pl.Trainer(
        accelerator="cpu", precision="bf16-true", max_epochs=1, logger=False, enable_checkpointing=False
    )
    with pytest.raises(ValueError, match=r"trainer\.precision bf16-true.*Use bf16-mixed"):
        trainer.fit(CLIP4Clip(TinyClipEncoder(width=64)), datamodule=data)


MIXED = ("hardware/gpu1-bf16", "trainer.precision bf16-mixed")


@pytest.mark.parametrize(
    ("recipe", "overlay", "found"),
    [
        *((recipe, *MIXED) for recipe in ("clip4clip", "drl", "gare", "ncl", "tcmgc", "ucofia", "xclip")),
        ("clip4clip", "hardware/fsdp8-bf16", "strategy lightning.pytorch.strategies.ModelParallelStrategy"),
        ("clip4clip", "backbone/siglip2-b-16", "ViT-B-16-SigLIP2"),
    ],
)
def test_float16_recipes_refuse_what_they_cannot_run_under(recipe, overlay, found, tmp_path, capsys):
    words = ["fit", f"--config={recipe}", f"--config={overlay}", f"--data.init_args.root={tmp_path}"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert found in said
    assert "recipes/variants/float32.yaml" in said
    assert len(said.splitlines()) == 1
    main([*words, "--config=variants/float32"])
    assert "MSRVTT_data.json" in capsys.readouterr().err, "with the variant, data are the next thing that is missing"


def test_float16_trains_on_a_cpu_and_says_that_it_is_slow(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    words = [
        "fit", "--config=clip4clip", "--config=fixture", f"--data.init_args.root={synthetic_data()}",
        "--model.init_args.encoder.init_args.encoder_precision=float16", "--data.init_args.batch_size=2",
        "--trainer.accelerator=cpu",
        "--data.init_args.num_workers=0", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1",
        "--data.init_args.max_train_videos=4", "--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1",
        f"--results.directory={tmp_path / 'runs'}", "--model.init_args.optimizer={name: bert-adam, encoder_lr: 1e-7}",
    ]  # fmt: skip
    assert main(words) == 0
    assert caplog.text.count("encoder_precision float16 is slow on a CPU") == 1
