"""Ranks by counting: ties, several captions per video, NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tvr_lightning.ranks import count_ranks, text_to_video_ranks, video_to_text_ranks


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_counts_equal_plain_loops_with_many_ties(data):
    queries, gallery = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    row = st.lists(st.integers(-2, 2), min_size=gallery, max_size=gallery)
    scores = data.draw(st.lists(row, min_size=queries, max_size=queries))
    match = data.draw(st.lists(st.integers(0, gallery - 1), min_size=queries, max_size=queries))
    ranks = count_ranks(torch.tensor(scores, dtype=torch.float32), torch.tensor(match))
    pairs = list(zip(scores, match, strict=True))
    assert ranks.better.tolist() == [sum(score > row[own] for score in row) for row, own in pairs]
    assert ranks.tied.tolist() == [sum(score == row[own] for score in row) for row, own in pairs]


def test_a_video_ranks_by_its_best_caption_among_the_best_of_others():
    # Videos 0 and 2 have two captions, video 1 has none, video 3 has one.
    video_of_text = torch.tensor([0, 2, 0, 3, 2])
    similarity = torch.tensor([
        [0.2, 0.9, 0.1, 0.3],
        [0.5, 0.9, 0.3, 0.9],
        [0.4, 0.9, 0.8, 0.2],
        [0.1, 0.9, 0.2, 0.9],
        [0.6, 0.9, 0.2, 0.1],
    ])  # fmt: skip
    ranks = video_to_text_ranks(similarity, video_of_text)
    assert ranks.index.tolist() == [0, 2, 3]
    # 0: own best .4, video 2's best .6, video 3's .1; 2: own .3, video 0's .8; 3: own .9, video 2's .9 ties.
    assert ranks.better.tolist() == [1, 1, 0]
    assert ranks.tied.tolist() == [1, 1, 2]


def test_the_number_and_the_place_of_nan_scores_are_named():
    similarity = torch.zeros(4, 3)
    similarity[2, 1] = similarity[3, 1] = float("nan")
    match = torch.tensor([0, 1, 2, 0])
    message = "2 of 12 scores are NaN, in 2 rows and 1 columns; the first is text 2 against"
    with pytest.raises(ValueError, match=message):
        text_to_video_ranks(similarity, match)
    with pytest.raises(ValueError, match="the first is text 2 against video 1"):
        video_to_text_ranks(similarity, match)


def test_expected_rank_and_recall_equal_the_mean_over_random_tie_breaks():
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor([[0.5, 0.5, 0.9, 0.5, 0.1, 0.5]])
    order = torch.rand(20_000, 6, generator=generator).argsort(1)
    ranked = order.gather(1, scores[0, order].argsort(dim=1, descending=True, stable=True))
    drawn = 1 + (ranked == 3).int().argmax(1).double()
    ranks = count_ranks(scores, torch.tensor([3]))
    assert ranks.expected().item() == pytest.approx(drawn.mean().item(), abs=0.05)
    for k in (1, 2, 3, 4, 5, 6):
        assert ranks.found_within(k).item() == pytest.approx((drawn <= k).double().mean().item(), abs=0.02)
