"""TF32 holds in training steps alone, and is refused where there is none."""

from pathlib import Path

import pytest
import torch
from quick_trainer import quick_trainer

from tvr_lightning.cli import main
from tvr_lightning.testing.small import small, synthetic_data
from tvr_lightning.training.tf32 import TF32

RECIPES = Path(__file__).parents[2] / "recipes"


class OnACard(TF32):
    """As on a card that has TF32."""

    def setup(self, trainer, pl_module, stage):
        pass


class BrokenError(RuntimeError):
    pass


@pytest.mark.parametrize("breaks", [False, True])
def test_products_are_rounded_in_training_steps_and_nowhere_else(monkeypatch, breaks):
    method, data = small(RECIPES / "clip4clip.yaml")
    seen, steps, validation = [], method.training_step, method.validation_step

    def training_step(batch, batch_idx):
        seen.append(("train", torch.get_float32_matmul_precision()))
        if breaks and len(seen) > 4:
            raise BrokenError
        return steps(batch, batch_idx)

    def validation_step(batch, batch_idx, dataloader_idx=0):
        seen.append(("val", torch.get_float32_matmul_precision()))
        return validation(batch, batch_idx, dataloader_idx)

    monkeypatch.setattr(method, "training_step", training_step)
    monkeypatch.setattr(method, "validation_step", validation_step)
    trainer = quick_trainer(max_epochs=2, limit_train_batches=2, num_sanity_val_steps=1, callbacks=[OnACard()])
    try:
        trainer.fit(method, datamodule=data)
    except BrokenError:
        assert breaks
    assert ("train", "high") in seen
    assert ("val", "highest") in seen
    assert not {("train", "highest"), ("val", "high")} & set(seen)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_device_without_tf32_is_refused_in_a_sentence(tmp_path, capsys):
    words = ["fit", "--config", "clip4clip", "--config", "fixture", f"--data.init_args.root={synthetic_data()}"]
    words += ["--trainer.callbacks+=TF32", f"--results.directory={tmp_path}", "--trainer.accelerator=cpu"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "trainer.callbacks has TF32, which the device cpu does not support. Remove it" in said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("version_*"))
