"""Indexing and concatenation of batches of features."""

import pytest
import torch

from tvr_lightning.data.batch import Media, VideoBatch
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures


def video_batch(ids):
    pixels = torch.zeros(len(ids), 2, 3, 4, 4, dtype=torch.uint8)
    media = Media(pixels, torch.ones(len(ids), 2, dtype=torch.bool))
    return VideoBatch(media, torch.arange(len(ids)), ids, skipped=[f"{ids[0]}.mp4: broken"])


@pytest.mark.parametrize("index", [slice(1, 3), [1, 2], torch.tensor([1, 2]), torch.tensor([False, True, True])])
def test_indexing_selects_items_of_tensors_and_lists(index):
    batch = video_batch(["a", "b", "c"])[index]
    assert batch.video_id == ["b", "c"]
    assert batch.index.tolist() == [1, 2]
    assert len(batch.video) == 2


def test_cat_joins_fields_nested_records_and_extras():
    batch = VideoBatch.cat([video_batch(["a", "b"]), video_batch(["c"])])
    assert batch.video_id == ["a", "b", "c"]
    assert batch[:1].skipped == batch.skipped == ["a.mp4: broken", "c.mp4: broken"]
    mask = torch.ones(2, 3, dtype=torch.bool)
    text, video = TextFeatures(torch.ones(2, 4), torch.ones(2, 3, 4), mask), VideoFeatures(torch.ones(2, 3, 4), mask)
    pairs = PairedFeatures(text, video, torch.arange(2), torch.arange(2), {"extra": torch.arange(2.0)})
    assert pairs[[1]].extras["extra"].tolist() == [1.0]
    assert PairedFeatures.cat([pairs, pairs]).video.frames.shape == (4, 3, 4)


def test_cat_refuses_a_field_that_only_some_records_have():
    frames, mask = torch.ones(1, 2, 3), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"VideoFeatures\.audio is missing in 1 of 2"):
        VideoFeatures.cat([VideoFeatures(frames, mask, audio=frames), VideoFeatures(frames, mask)])
    with pytest.raises(ValueError, match="at least one"):
        VideoFeatures.cat([])
