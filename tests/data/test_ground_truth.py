"""The pairing of a split refuses what cannot be ranked."""

import pytest
import torch

from tvr_lightning.data.ground_truth import GroundTruth


@pytest.mark.parametrize(
    ("video_of_text", "message"),
    [
        (torch.tensor([0, 3]), "the test split of MSVD: text 1 describes video 3, but there are 3 videos"),
        (torch.tensor([0, -1]), "text 1 describes video -1"),
        (torch.tensor([0.0]), "one int64 per text"),
        (torch.zeros(1, 1, dtype=torch.int64), "one int64 per text"),
        (torch.tensor([], dtype=torch.int64), "no texts to rank"),
    ],
)
def test_a_video_may_have_no_text_but_every_text_has_a_video(video_of_text, message):
    assert GroundTruth(torch.tensor([2, 0, 2]), 4, "MSVD", "test", "all captions").texts == 3
    with pytest.raises(ValueError, match=message):
        GroundTruth(video_of_text, 3, "MSVD", "test", "all captions")
