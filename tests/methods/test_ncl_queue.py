"""A queue of features: first in, first out, filled part only, saved with the weights."""

import pytest
import torch

from tvr_lightning.features import VideoFeatures
from tvr_lightning.methods.ncl.queue import FeatureQueue


def videos(*numbers):
    frames = torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, 2, 3).clone()
    return VideoFeatures(frames, torch.ones(len(numbers), 2, dtype=torch.bool))


def numbers(queue):
    return queue.records(VideoFeatures).frames[:, 0, 0].int().tolist()


def test_the_oldest_leave_first_and_only_what_was_pushed_is_there():
    queue, seen = FeatureQueue(5), []
    assert len(queue) == 0
    for step in range(7):
        queue.push(videos(2 * step, 2 * step + 1))
        seen += [2 * step, 2 * step + 1]
        assert numbers(queue) == seen[-5:]
    queue.push(videos(*range(8)))
    assert numbers(queue) == [3, 4, 5, 6, 7]


def test_records_are_copies_without_gradient():
    queue, pushed = FeatureQueue(4), videos(1, 2)
    pushed.frames.requires_grad_()
    queue.push(pushed)
    assert not queue.records(VideoFeatures).frames.requires_grad
    assert queue.records(VideoFeatures).frame_mask.dtype == torch.bool
    assert queue.records(VideoFeatures).audio is None


def test_loading_continues_where_saving_stopped():
    queue, fresh = FeatureQueue(4), FeatureQueue(4)
    queue.push(videos(1, 2, 3, 4, 5, 6))
    fresh.load_state_dict(queue.state_dict())
    queue.push(videos(7))
    fresh.push(videos(7))
    assert numbers(fresh) == numbers(queue) == [4, 5, 6, 7]
    assert list(fresh.state_dict()) == list(queue.state_dict())
    queue.load_state_dict(FeatureQueue(4).state_dict())
    assert len(queue) == 0
    queue.push(videos(2))
    assert numbers(queue) == [2]


def test_what_does_not_fit_is_refused():
    queue = FeatureQueue(4)
    queue.push(videos(1))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        queue.push(VideoFeatures(torch.zeros(1, 2, 4), torch.ones(1, 2, dtype=torch.bool)))
    with pytest.raises(RuntimeError, match="size mismatch"):
        FeatureQueue(5).load_state_dict(queue.state_dict())
