"""The number of operations of scoring on a GPU, each of which is at least one kernel launch."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvr_lightning.pairwise import tiles
from tvr_lightning.testing.small import method_recipes, random_pairs, small

RECIPES = method_recipes(Path(__file__).parents[2] / "recipes")


class Operations(TorchDispatchMode):
    """Counts operators of torch."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("title", RECIPES)
def test_more_pairs_need_no_more_operations_off_a_cpu(title, monkeypatch):
    monkeypatch.setattr(tiles, "FAST_LOOPS", ())
    method = small(RECIPES[title])[0].eval()
    counts = []
    with torch.no_grad():
        for items in (32, 64):  # with few pairs, layers are combined in another way
            batch = random_pairs(method, items)
            text, video = method.text_features(batch.text), method.video_features(batch.video)
            with Operations() as operations:
                method.score(text, video)
            counts.append(operations.count)
    assert counts[0] == counts[1]
