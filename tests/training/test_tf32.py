"""TF32 is used only in training steps, and rejected on a device without it."""

from pathlib import Path

import pytest
import torch
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import small
from tvr_lightning.training.tf32 import TF32


def test_products_are_rounded_only_in_training_steps(monkeypatch):
    monkeypatch.setattr(TF32, "setup", lambda *given, **named: None)  # as on a card that supports TF32
    method, data = small(Path(__file__).parents[2] / "recipes" / "clip4clip.yaml")
    seen, steps, validation = [], method.training_step, method.validation_step

    def training_step(*batch):
        seen.append(("train", torch.get_float32_matmul_precision()))
        if len(seen) > 1:
            raise RuntimeError("broken")
        return steps(*batch)

    def validation_step(*batch):
        seen.append(("val", torch.get_float32_matmul_precision()))
        return validation(*batch)

    method.training_step, method.validation_step = training_step, validation_step
    trainer = quiet_trainer(max_epochs=1, val_check_interval=1, num_sanity_val_steps=0, callbacks=[TF32()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(method, datamodule=data)
    assert (seen[0], seen[-1]) == (("train", "high"), ("train", "high"))
    assert set(seen[1:-1]) == {("val", "highest")}
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_device_without_tf32_is_rejected(msrvtt, tmp_path, capsys):
    assert main(["fit", *small_run(msrvtt, tmp_path, "--trainer.callbacks+=TF32")]) == 2
    message = capsys.readouterr().err
    assert "trainer.callbacks has TF32, which the device cpu does not support. Remove it" in message
    assert "Traceback" not in message
    assert not list(tmp_path.rglob("version_*"))
