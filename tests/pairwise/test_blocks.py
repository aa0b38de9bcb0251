from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch, Scores
from tvr_lightning.pairwise import score_in_blocks


@dataclass
class Vectors(FeatureBatch):
    vectors: Tensor


@pytest.fixture
def items():
    torch.manual_seed(0)
    return Vectors(torch.randn(7, 5, requires_grad=True)), Vectors(torch.randn(9, 5, requires_grad=True))


def product(text, video):
    similarity = text.vectors @ video.vectors.T
    return Scores(similarity.tanh(), {"product": similarity})


@pytest.mark.parametrize("few", ["video", "text", "both"])
@pytest.mark.parametrize("pairs", [1, 7, 20, 62, 1000])
def test_scores_and_gradients_do_not_depend_on_the_blocks(items, pairs, few):
    text, video = items
    whole = product(text, video)
    made = score_in_blocks(product, text, video, pair_bytes=10, budget=10 * pairs, few=few)
    torch.testing.assert_close(made.similarity, whole.similarity)
    torch.testing.assert_close(made.parts["product"], whole.parts["product"])
    inputs = [text.vectors, video.vectors]
    found, expected = (torch.autograd.grad(scores.similarity.sin().sum(), inputs) for scores in (made, whole))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("texts", "videos", "budget", "few", "first"),
    [
        (7, 9, 70, "video", (7, 1)),
        (7, 9, 35, "video", (3, 1)),
        (7, 9, 10, "video", (1, 1)),
        (7, 9, 10_000, "video", (7, 9)),
        (7, 9, 180, "text", (2, 9)),
        (7, 9, 35, "text", (1, 3)),
        (7, 9, 95, "both", (3, 3)),
        (7, 9, 620, "both", (7, 8)),
        (1, 9, 90, "both", (1, 9)),
        (7, 2, 120, "both", (6, 2)),
        (1000, 20, 13000, "video", (160, 8)),  # one video at a time would read all texts again for few rows
    ],
)
def test_blocks_are_as_large_as_the_budget_allows(texts, videos, budget, few, first):
    seen = []

    def watched(text, video):
        seen.append((len(text), len(video)))
        return product(text, video)

    items = Vectors(torch.zeros(texts, 1)), Vectors(torch.zeros(videos, 1))
    with torch.no_grad():
        score_in_blocks(watched, *items, pair_bytes=10, budget=budget, few=few)
    assert seen[0] == max(seen) == first
    assert sum(n * m for n, m in seen) == texts * videos


def test_a_budget_below_one_pair_is_refused(items):
    with pytest.raises(UserError, match="scores of one pair need 10 bytes, but half of the memory budget is 9 bytes"):
        score_in_blocks(product, *items, pair_bytes=10, budget=9)


def test_dropout_is_the_same_when_a_block_is_recomputed(items):
    text, video = items

    def noisy(text, video):
        return Scores(F.dropout(text.vectors @ video.vectors.T, 0.5))

    made = score_in_blocks(noisy, text, video, pair_bytes=10, budget=140)
    mask = (made.similarity != 0).float() * 2
    made.similarity.sum().backward()
    torch.testing.assert_close(text.vectors.grad, mask @ video.vectors)
