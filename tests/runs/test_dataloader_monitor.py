"""Training that waits for original video files says so once, with the command that helps."""

import time
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from tvr_lightning.data.loader import TrainingLoader
from tvr_lightning.data.samplers import TrainingSampler
from tvr_lightning.runs import progress_report
from tvr_lightning.runs.progress_report import DataloaderMonitor
from tvr_lightning.testing.small import small

RECIPE = Path(__file__).parents[2] / "recipes" / "clip4clip.yaml"


def test_a_loader_counts_what_is_waited_for_it():
    class Slow:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            time.sleep(0.01)
            return index

    loader = TrainingLoader(Slow(), batch_size=2, sampler=TrainingSampler(6, 2, seed=0, replicas=1, rank=0))
    batches, outside, start = 0, 0.0, time.perf_counter()
    for _ in loader:
        batches += 1
        between = time.perf_counter()
        time.sleep(0.05)
        outside += time.perf_counter() - between
    assert batches == 3
    assert 0.06 <= loader.waited <= time.perf_counter() - start - outside


@pytest.mark.parametrize(("slow", "device", "heard"), [(True, "cpu", 1), (True, "cuda", 0), (False, "cpu", 0)])
def test_what_is_worth_saying_is_said_once(monkeypatch, caplog, slow, device, heard):
    """On a device that ought not to wait, after the watched steps, where the files are originals."""
    method, data = small(RECIPE)
    monkeypatch.setattr(progress_report, "WARM", 1)
    monkeypatch.setattr(progress_report, "WATCHED", 2)
    monkeypatch.setattr(progress_report, "MUCH", 0.0 if slow else 1.0)
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, limit_train_batches=3, limit_val_batches=0, logger=False,
        callbacks=[DataloaderMonitor((device,))], enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    with caplog.at_level("INFO"):
        trainer.fit(method, datamodule=data)
    said = [sentence for sentence in caplog.messages if "waited for clips" in sentence]
    assert len(said) == heard
    assert all("tvr data compress" in sentence for sentence in said)
