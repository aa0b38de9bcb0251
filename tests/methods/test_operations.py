"""The number of operations of scoring on a GPU, each of which is at least one kernel launch."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvr_lightning.pairwise import tiles
from tvr_lightning.testing.small import method_recipes, random_pairs, small

MEMORY = {f"aten::{name}" for name in ("_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided")}
RECIPES = method_recipes(Path(__file__).parents[2] / "recipes")


class Operations(TorchDispatchMode):
    """Counts operators of torch, and those that compute something: each is about one kernel launch."""

    count = launches = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        self.launches += not operator.is_view and operator._schema.name not in MEMORY
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("title", RECIPES)
def test_more_pairs_need_no_more_operations_off_a_cpu(title, monkeypatch):
    monkeypatch.setattr(tiles, "FAST_LOOPS", ())
    method = small(RECIPES[title])[0].eval()
    counts, batch = [], random_pairs(method, 32)
    with torch.no_grad():
        text, video = method.text_features(batch.text), method.video_features(batch.video)
        for times in (1, 2):  # with few pairs, layers are combined in another way
            texts, videos = type(text).cat([text] * times), type(video).cat([video] * times)
            with Operations() as operations:
                method.score(texts, videos)
            counts.append(operations.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("title", ["GARE", "TMASS", "XPool"])
def test_a_training_step_needs_fewer_operations_off_a_cpu(title, monkeypatch):
    method = small(RECIPES[title])[0].train()
    pairs = method.pair_features(random_pairs(method, 8)).detach().float()
    losses, counts = [], []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(tiles, "FAST_LOOPS", devices)
        with Operations() as operations:
            torch.manual_seed(0)
            loss = sum(method.losses(pairs).values())
            losses.append([loss, *torch.autograd.grad(loss, list(method.head.parameters()))])
        counts.append(operations.count)
    assert counts[1] < 0.85 * counts[0]
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_training_step_of_xpool_needs_no_more_launches_than_as_released(monkeypatch):
    monkeypatch.setattr(tiles, "FAST_LOOPS", ())
    method = small(RECIPES["XPool"])[0].train()
    pairs = method.pair_features(random_pairs(method, 8)).detach().float()
    with Operations() as operations:
        method.losses(pairs)["info_nce"].backward()
    assert operations.launches <= 91
