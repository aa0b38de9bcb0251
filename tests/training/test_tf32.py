"""TF32 is used only in training steps, and rejected on a device without it."""

import contextlib
from pathlib import Path

import pytest
import torch
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import small
from tvr_lightning.training.tf32 import TF32

RECIPES = Path(__file__).parents[2] / "recipes"


class OnACard(TF32):
    """As on a card that supports TF32."""

    def setup(self, trainer, pl_module, stage):
        pass


class BrokenError(RuntimeError):
    pass


@pytest.mark.parametrize("breaks", [False, True])
def test_products_are_rounded_only_in_training_steps(monkeypatch, breaks):
    method, data = small(RECIPES / "clip4clip.yaml")
    seen, steps, validation = [], method.training_step, method.validation_step

    def training_step(batch, batch_idx):
        seen.append(("train", torch.get_float32_matmul_precision()))
        if breaks:
            raise BrokenError
        return steps(batch, batch_idx)

    def validation_step(*batch):
        seen.append(("val", torch.get_float32_matmul_precision()))
        return validation(*batch)

    monkeypatch.setattr(method, "training_step", training_step)
    monkeypatch.setattr(method, "validation_step", validation_step)
    options = {"limit_train_batches": 2, "num_sanity_val_steps": int(breaks), "callbacks": [OnACard()]}
    trainer = quiet_trainer(max_epochs=1, **options)
    with pytest.raises(BrokenError) if breaks else contextlib.nullcontext():
        trainer.fit(method, datamodule=data)
    assert set(seen) == {("train", "high"), ("val", "highest")}
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_device_without_tf32_is_rejected(msrvtt, tmp_path, capsys):
    assert main(["fit", *small_run(msrvtt, tmp_path, "--trainer.callbacks+=TF32")]) == 1
    said = capsys.readouterr().err
    assert "trainer.callbacks has TF32, which the device cpu does not support. Remove it" in said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("version_*"))
