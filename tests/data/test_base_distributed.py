import os
from pathlib import Path

import torch

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision
from tvr_lightning.testing import run_processes

# isort: split
import lightning.pytorch as pl

from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.data.msrvtt import MSRVTT

OPTIONS = {
    "frames": 2,
    "image_size": 16,
    "batch_size": 4,
    "eval_batch_size": 3,
    "num_workers": 0,
    "holdout": 3,
    "captions_per_epoch": "one",
}


class Recorder(pl.LightningModule):
    """Notes which samples this process sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = [[], []]
        self.sizes: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.trained.append([])

    def training_step(self, batch: PairBatch) -> torch.Tensor:
        self.trained[-1] += batch.text.index.tolist()
        self.sizes.append(len(batch))
        return self.weight.sum()

    def validation_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int) -> None:
        self.validated[dataloader_idx] += batch.index.tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank: int, root: str) -> dict[str, list]:
    # Lightning joins the process group that exists and starts no processes of its own.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    model = Recorder()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=True,  # even so, Lightning's sampler must not take the place of ours
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=root,
    )
    trainer.fit(model, datamodule=MSRVTT(root=root, **OPTIONS))
    return {"trained": model.trained, "validated": model.validated, "sizes": model.sizes}


def test_two_processes_share_batches_and_validate_equally_often(synthetic_msrvtt: Path):
    first, second = run_processes(fit, 2, str(synthetic_msrvtt))
    assert first["sizes"] == second["sizes"] == [2] * 4  # two epochs of two global batches of 4, halved
    alone = MSRVTT(root=str(synthetic_msrvtt), **OPTIONS)
    for epoch, (ours, theirs) in enumerate(zip(first["trained"], second["trained"], strict=True)):
        loader = alone.train_dataloader()
        loader.sampler.set_epoch(epoch)
        for k, batch in enumerate(loader):
            assert sorted(batch.text.index.tolist()) == sorted(ours[2 * k : 2 * k + 2] + theirs[2 * k : 2 * k + 2])
    for ours, theirs in zip(first["validated"], second["validated"], strict=True):
        assert len(ours) == len(theirs) == 4
        for epoch in (slice(0, 2), slice(2, 4)):  # three items on two processes: the first one comes again
            assert set(ours[epoch] + theirs[epoch]) == {0, 1, 2}
