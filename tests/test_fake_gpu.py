"""Every method trains and is evaluated on a fake GPU, on one device and with few waits (`make test-fake-gpu`)."""

from pathlib import Path

import pytest
import torch
from fake_gpu import FakeGpu, GpuTensor

from tvr_lightning.evaluation.loop import evaluate, predict
from tvr_lightning.testing import method_recipes, small

RECIPES = method_recipes(Path(__file__).parent.parent / "recipes")
# Functions that wait for the device, by method. Remove those that no longer wait.
IN_EVALUATION = {"NCL on CLIP4Clip": {f"methods.ncl.queue.FeatureQueue.{name}" for name in ("__len__", "records")}}
EVERY_EVALUATION = {"methods.base.RetrievalModule.score_temperature"}

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")


@pytest.mark.parametrize("title", RECIPES)
def test_a_method_stays_on_the_device_and_waits_only_in_known_functions(title):
    method, data = small(RECIPES[title])
    data.needs = method.needs
    data.setup("fit")
    with FakeGpu() as gpu:
        gpu.move(method)
        batch = data.transfer_batch_to_device(next(iter(data.train_dataloader())), gpu.device, 0)
        gpu.waits.clear()
        pairs = method.train().pair_features(batch)
        terms = method.contrast.terms(method.losses, pairs.float())
        if method.reads_pairs:
            method.update_state(pairs.detach())
        assert all(isinstance(term, GpuTensor) for term in terms.values())
        assert gpu.waits == set()

        gpu.waits.clear()
        method.eval()
        with torch.no_grad():
            for loader in data.val_dataloader():
                for batch in loader:
                    method.validation_step(data.transfer_batch_to_device(batch, gpu.device, 0), 0)
            split, truth = method.encoded.join(gpu.device), data.ground_truth("val")
            evaluation = evaluate(method, split, truth)
            _, scores, _ = predict(method, split, truth)
        assert (evaluation.texts, evaluation.videos) == (truth.texts, truth.videos)
        assert isinstance(scores, GpuTensor)
        waits = {place for place in gpu.waits if not place.startswith("evaluation.")}  # ranks are needed on the CPU
        assert waits == EVERY_EVALUATION | IN_EVALUATION.get(title, set())
