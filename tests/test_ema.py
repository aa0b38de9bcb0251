"""Averaged weights as a callback: what a run ends with is the moving average of its weights."""

import pytest
import torch
from scale_models import build

# isort: split
import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging

from tvr_lightning.testing.processes import Batches

DECAY = 0.5


class Watch(pl.Callback):
    """Notes the weights after every step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append({name: value.detach().clone() for name, value in pl_module.named_parameters()})


@pytest.mark.filterwarnings("ignore:You defined a .validation_step")
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")  # nothing is sharded here
def test_a_run_ends_with_the_moving_average_of_its_weights():
    method, watch = build("CLIP4Clip"), Watch()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[EMAWeightAveraging(decay=DECAY), watch],
    )  # fmt: skip
    trainer.fit(method, datamodule=Batches(method, 4))
    average = watch.seen[0]
    for weights in watch.seen[1:]:
        average = {name: DECAY * average[name] + (1 - DECAY) * value for name, value in weights.items()}
    for name, value in method.named_parameters():
        torch.testing.assert_close(value.detach(), average[name], msg=lambda m, n=name: f"{n}: {m}")
    last = watch.seen[-1]["encoder.clip.text_projection"]
    assert not torch.allclose(last, average["encoder.clip.text_projection"])
