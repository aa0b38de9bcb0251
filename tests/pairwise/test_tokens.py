"""Products of tokens, matrices in a row, and a score of gaps in blocks."""

import pytest
import torch
from torch import nn

from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.pairwise import PairVectors, mapped_between, mapped_by, score_in_blocks, token_similarities
from tvr_lightning.pairwise.base import chained

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


@pytest.mark.parametrize("few", ["video", "text", "both"])
@pytest.mark.parametrize("grad", [False, True])
def test_blocks_score_as_the_whole(sides, few, grad):
    head = GapScores()
    with torch.set_grad_enabled(grad):
        whole = score_in_blocks(head.score, *sides, pair_bytes=1, budget=1000, few=few).similarity
        for budget in (1, 3, 20):
            blocks = score_in_blocks(head.score, *sides, pair_bytes=1, budget=budget, few=few).similarity
            torch.testing.assert_close(blocks, whole)
    if grad:
        blocks.sum().backward()
        split = [p.grad.clone() for p in head.parameters()]
        head.zero_grad()
        whole.sum().backward()
        for one, other in zip(split, [p.grad for p in head.parameters()], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_layers_in_a_row_are_the_same_folded_and_one_by_one():
    first, second = nn.Linear(D, D).double(), nn.Linear(D, D).double()
    many = torch.randn(5 * D, D, dtype=torch.double)
    torch.testing.assert_close(chained(many, first, second), second(first(many)))
    torch.testing.assert_close(chained(many[:2], first, second), second(first(many[:2])))
    assert chained(many) is many
    torch.testing.assert_close(
        mapped_by(many, first.weight, second.weight, first.weight), many @ first.weight @ second.weight @ first.weight
    )
    assert mapped_by(many) is many


def test_token_similarities_and_their_bad_input():
    video, text = torch.randn(M, F, D), torch.randn(N, 2, D)
    torch.testing.assert_close(token_similarities(video, text), torch.einsum("mfd,nwd->fmwn", video, text))
    assert token_similarities(video, text).is_contiguous()
    assert token_similarities(video[:0], text).shape == (F, 0, 2, N)
    for wrong in (text[0], torch.randn(N, 2, D + 1)):
        with pytest.raises(ValueError, match="token_similarities needs"):
            token_similarities(video, wrong)


def test_matrices_between_map_the_side_of_fewer_tokens():
    first, second = torch.randn(2, D, D, dtype=torch.double)
    for videos, texts in ((1, 9), (9, 1)):
        video, text = torch.randn(videos, F, D).double(), torch.randn(texts, F, D).double()
        frames, words = mapped_between(video, text, first, second)
        assert (frames is video, words is text) == (videos > texts, texts > videos)
        expected = torch.einsum("mfd,nwd->fmwn", video, text @ first @ second)
        torch.testing.assert_close(token_similarities(frames, words), expected)
    assert mapped_between(video, text)[1] is text


def test_no_text_or_no_video_is_refused_and_a_small_budget_scores_pair_by_pair(sides):
    text, video = sides
    head = GapScores()
    for few in (text[:0], video), (text, video[:0]):
        with pytest.raises(ValueError, match="nothing to score"):
            score_in_blocks(head.score, *few, pair_bytes=1)
    with torch.no_grad():
        alone = score_in_blocks(head.score, text, video, pair_bytes=10**9, budget=1).similarity
        torch.testing.assert_close(alone, head.score(text, video).similarity)


def test_half_precision_on_the_way_in_is_computed_in_float32(sides):
    text, video = sides
    head = GapScores()
    with torch.no_grad():
        half = score_in_blocks(head.score, text.to(torch.bfloat16), video.to(torch.bfloat16), 1, budget=8)
        expected = head.score(text.to(torch.bfloat16).float(), video.to(torch.bfloat16).float()).similarity
    assert half.similarity.dtype == torch.float32
    torch.testing.assert_close(half.similarity, expected)
