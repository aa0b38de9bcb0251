"""What belongs to one side alone is made once per call, and only where that is safe."""

import weakref

import pytest
import torch
from torch import nn

from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.pairwise import PairVectors, mapped_between, mapped_by, score_in_blocks, token_similarities
from tvr_lightning.pairwise.base import chained
from tvr_lightning.pairwise.block_cache import once, origin_of, persisting

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
def test_blocks_score_as_the_whole_whatever_is_kept(sides, few, grad):
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


def test_a_new_call_makes_everything_anew(sides):
    head = GapScores()
    with torch.no_grad():
        before = score_in_blocks(head.score, *sides, pair_bytes=1, budget=8).similarity
        head.weight.mul_(2)
        after = score_in_blocks(head.score, *sides, pair_bytes=1, budget=8).similarity
    torch.testing.assert_close(after, score_in_blocks(head.score, *sides, pair_bytes=1, budget=1000).similarity)
    assert not torch.allclose(before, after)


def test_nothing_is_kept_with_gradients_nor_of_other_tensors():
    kept, other, made = torch.randn(4, D), torch.randn(4, D), []
    with persisting([kept], blocks=2):
        assert origin_of(kept) is None
    with torch.no_grad(), persisting([kept], blocks=2):
        assert origin_of(other) is None
        assert origin_of(kept[:2]) is None
        assert origin_of(kept.unsqueeze(1)) is not None
        for origin in (None, origin_of(kept)):
            for _ in range(2):
                once(origin, lambda: made.append(1) or kept)
    assert len(made) == 3


def test_each_item_s_share_is_made_once_however_both_sides_are_split(sides):
    made = {"words": 0, "frames": 0}

    def counted(name, tensor):
        origin = origin_of(tensor)
        assert origin is not None
        return once((*origin, "sum"), lambda: made.__setitem__(name, made[name] + len(tensor)) or tensor.sum((1, 2)))

    def score(text, video):
        return Scores(counted("words", text.words)[:, None] + counted("frames", video.frames))

    with torch.no_grad():
        scores = score_in_blocks(score, *sides, pair_bytes=1, budget=4, few="both").similarity
    text, video = sides
    torch.testing.assert_close(scores, text.words.sum((1, 2))[:, None] + video.frames.sum((1, 2)))
    assert made == {"words": N, "frames": M}


def test_what_is_made_within_goes_with_its_tensors_and_the_rest_stays():
    outer, inner, made = torch.randn(4, D), torch.randn(4, D), []
    with torch.no_grad(), persisting([outer], blocks=2):
        for _ in range(2):
            with persisting([inner], blocks=3):
                for tensor in (outer, inner):
                    once(origin_of(tensor), lambda tensor=tensor: made.append(tensor) or tensor)
            assert origin_of(inner) is None
        with persisting([inner], blocks=1):
            assert origin_of(inner) is None
    assert [tensor is outer for tensor in made] == [True, False, False]


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


def test_a_matrix_that_is_named_lives_as_long_as_the_call(sides):
    """Another one in its place in memory would have its name."""
    with torch.no_grad(), persisting([sides[0].sentence], blocks=2):
        vectors = PairVectors.from_texts(sides[0].sentence.unsqueeze(1), M)
        swapped = torch.eye(D).flip(0)
        named = weakref.ref(swapped)
        torch.testing.assert_close(vectors.linear(swapped).materialize()[:, 0, 0], sides[0].sentence.flip(1))
        del swapped
        assert named() is not None
    assert named() is None


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
