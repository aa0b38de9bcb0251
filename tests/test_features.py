"""Batches of features: moving, indexing, and concatenation."""

import pytest
import torch

from tvr_lightning.data.batch import Media, VideoBatch
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures, first_of_each


def text(n: int, dtype: torch.dtype = torch.float32) -> TextFeatures:
    words = torch.arange(n * 6, dtype=dtype).reshape(n, 3, 2)
    return TextFeatures(words[:, 0], words, torch.ones(n, 3, dtype=torch.bool))


def video_batch(ids: list[str]) -> VideoBatch:
    pixels = torch.zeros(len(ids), 2, 3, 4, 4, dtype=torch.uint8)
    media = Media(pixels, torch.ones(len(ids), 2, dtype=torch.bool))
    return VideoBatch(media, torch.arange(len(ids)), ids, skipped=[f"{ids[0]}.mp4: broken"])


@pytest.mark.parametrize("index", [slice(1, 3), [1, 2], torch.tensor([1, 2]), torch.tensor([False, True, True])])
def test_indexing_selects_tensors_and_lists_alike(index):
    batch = video_batch(["a", "b", "c"])
    assert batch[index].video_id == ["b", "c"]
    assert batch[index].index.tolist() == [1, 2]
    assert len(batch[index].video) == 2


def test_whole_fields_survive_indexing_and_are_joined_by_cat():
    batch = VideoBatch.cat([video_batch(["a", "b"]), video_batch(["c"])])
    assert batch.video_id == ["a", "b", "c"]
    assert batch.skipped == ["a.mp4: broken", "c.mp4: broken"]
    assert batch[:1].skipped == batch.skipped
    assert len(batch) == 3


def test_moving_to_a_dtype_leaves_indices_and_masks():
    moved = text(2).to(torch.float64)
    assert moved.words.dtype == torch.float64
    assert moved.word_mask.dtype == torch.bool


def test_float_casts_half_precision_and_keeps_float64():
    assert text(1, torch.bfloat16).float().words.dtype == torch.float32
    assert text(1, torch.float64).float().words.dtype == torch.float64


def test_pairs_reach_into_nested_records_and_extras():
    video = VideoFeatures(torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    pairs = PairedFeatures(text(2), video, torch.arange(2), torch.arange(2), {"extra": torch.arange(2.0)})
    assert pairs[[1]].extras["extra"].tolist() == [1.0]
    assert PairedFeatures.cat([pairs, pairs]).video.frames.shape == (4, 3, 4)


def test_first_of_each_finds_distinct_items():
    assert first_of_each(torch.tensor([3, 1, 3, 0, 1])).tolist() == [3, 1, 0]


def test_cat_refuses_a_field_that_only_some_records_have():
    frames, mask = torch.ones(1, 2, 3), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"VideoFeatures\.audio is missing in 1 of 2"):
        VideoFeatures.cat([VideoFeatures(frames, mask, audio=frames), VideoFeatures(frames, mask)])
    with pytest.raises(ValueError, match="at least one"):
        VideoFeatures.cat([])
