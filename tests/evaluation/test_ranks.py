"""Ranks by counting: ties, several captions per video."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tvr_lightning.ranks import count_ranks, video_to_text_ranks


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
