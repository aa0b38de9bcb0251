"""Products of tokens, consecutive layers, and pair vectors in blocks."""

import pytest
import torch
from torch import nn

from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.pairwise import PairVectors, chained, mapped_between, score_in_blocks, token_similarities

N, M, F, D = 7, 6, 3, 8


@pytest.fixture
def sides():
    torch.manual_seed(0)
    text = TextFeatures(torch.randn(N, D), torch.randn(N, 2, D), torch.ones(N, 2, dtype=torch.bool))
    return text, VideoFeatures(torch.randn(M, F, D), torch.ones(M, F, dtype=torch.bool))


class GapScores(nn.Linear):
    """Scores pairs by the logits of their gaps."""

    def __init__(self):
        super().__init__(D, D)
        self.norm, self.key = nn.LayerNorm(D), nn.Linear(D, D)

    def score(self, text, video):
        gap = PairVectors.from_videos(video.frames.float().mean(1, keepdim=True), len(text)) - PairVectors.from_texts(
            text.sentence.unsqueeze(1), len(video)
        )
        return Scores(gap.layer_norm(self.norm).logits(video.frames, self, self.key).sum((1, 3)).T)


@pytest.mark.parametrize(("few", "budget"), [("video", 20), ("text", 3), ("both", 1)])
def test_pair_vectors_score_the_same_in_blocks(sides, few, budget):
    head, found = GapScores(), []
    for each in (1000, budget):
        scores = score_in_blocks(head.score, *sides, pair_bytes=1, budget=each, few=few).similarity
        found.append([scores, *torch.autograd.grad(scores.sum(), list(head.parameters()))])
        with torch.no_grad():
            again = score_in_blocks(head.score, *sides, pair_bytes=1, budget=each, few=few).similarity
        torch.testing.assert_close(again, scores)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_consecutive_layers_can_be_folded_into_one():
    first, second = nn.Linear(D, D).double(), nn.Linear(D, D).double()
    many = torch.randn(5 * D, D, dtype=torch.double)
    torch.testing.assert_close(chained(many, first, second), second(first(many)))
    torch.testing.assert_close(chained(many[:2], first, second), second(first(many[:2])))
    assert chained(many) is many
    torch.testing.assert_close(chained(many, first.weight, second.weight), many @ first.weight.T @ second.weight.T)


def test_token_similarities_are_products_of_all_tokens():
    video, text = torch.randn(M, F, D), torch.randn(N, 2, D)
    torch.testing.assert_close(token_similarities(video, text), torch.einsum("mfd,nwd->fmwn", video, text))
    assert token_similarities(video, text).is_contiguous()
    assert token_similarities(video[:0], text).shape == (F, 0, 2, N)
    for wrong in (text[0], torch.randn(N, 2, D + 1)):
        with pytest.raises(ValueError, match="token_similarities needs"):
            token_similarities(video, wrong)


def test_matrices_are_applied_to_the_side_with_fewer_tokens():
    first, second = torch.randn(2, D, D, dtype=torch.double)
    for videos, texts in ((1, 9), (9, 1)):
        video, text = torch.randn(videos, F, D).double(), torch.randn(texts, F, D).double()
        frames, words = mapped_between(video, text, first, second)
        assert (frames is video, words is text) == (videos > texts, texts > videos)
        expected = torch.einsum("mfd,nwd->fmwn", video, text @ first @ second)
        torch.testing.assert_close(token_similarities(frames, words), expected)
    assert mapped_between(video, text)[1] is text
