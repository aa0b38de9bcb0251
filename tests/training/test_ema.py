"""Moving averages of weights with Lightning's callback."""

import pytest
import torch
from scale_models import build

# isort: split
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback

from tvr_lightning.testing.processes import Batches, quiet_trainer

DECAY = 0.5


@pytest.mark.filterwarnings("ignore:You defined a .validation_step")
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")  # nothing is sharded here
def test_a_run_ends_with_the_moving_average_of_its_weights():
    method, seen = build("CLIP4Clip"), []

    def note(trainer, module, *batch):
        seen.append({name: value.detach().clone() for name, value in module.named_parameters()})

    callbacks = [EMAWeightAveraging(decay=DECAY), LambdaCallback(on_train_batch_end=note)]
    quiet_trainer(max_epochs=1, callbacks=callbacks).fit(method, datamodule=Batches(method, 3))
    average = seen[0]
    for weights in seen[1:]:
        average = {name: DECAY * average[name] + (1 - DECAY) * value for name, value in weights.items()}
    for name, value in method.named_parameters():
        torch.testing.assert_close(value.detach(), average[name], msg=lambda m, n=name: f"{n}: {m}")
    last = seen[-1]["encoder.clip.text_projection"]
    assert not torch.allclose(last, average["encoder.clip.text_projection"])
