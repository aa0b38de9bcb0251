"""Samplers and ground truth: batches of every process, and the videos of texts."""

import pytest
import torch

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.data.loader import EvaluationSampler, TrainingSampler
from tvr_lightning.errors import UserError


def batches(samples: int, batch_size: int, replicas: int, epoch: int = 0) -> list[list[set[int]]]:
    """Samples of each batch of each process."""
    result = []
    for rank in range(replicas):
        sampler = TrainingSampler(samples, batch_size, seed=3, replicas=replicas, rank=rank)
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert {at for at, _ in order} == {epoch}
        share = batch_size // replicas
        assert len(order) == len(sampler)
        result.append([{i for _, i in order[k : k + share]} for k in range(0, len(order), share)])
    return result


def test_global_batches_do_not_depend_on_the_number_of_processes():
    alone = batches(50, 12, 1)[0]
    for replicas in (2, 3, 4):
        steps = list(zip(*batches(50, 12, replicas), strict=True))
        assert [set().union(*parts) for parts in steps] == alone
        assert all(sum(map(len, parts)) == 12 for parts in steps)
    assert len(alone) == 4  # 50 samples fill four batches of 12
    assert batches(50, 12, 1, epoch=1) == batches(50, 12, 1, epoch=1) != alone


def test_a_resumed_epoch_continues_at_its_position():
    whole = TrainingSampler(50, 12, seed=3, replicas=2, rank=1)
    whole.set_epoch(4)
    expected = list(whole)
    resumed = TrainingSampler(50, 12, seed=3, replicas=2, rank=1)
    resumed.load_state_dict({"epoch": 4, "consumed": 24})
    assert (resumed.epoch, resumed.consumed) == (4, 24)
    resumed.set_epoch(4)  # as Lightning does before it iterates
    assert list(resumed) == expected[12:]
    assert len(resumed) == len(expected)
    resumed.set_epoch(5)
    assert len(list(resumed)) == len(expected)
    with pytest.raises(ValueError, match="13 consumed samples are not a multiple of the batch_size 12"):
        resumed.load_state_dict({"epoch": 0, "consumed": 13})


def test_the_last_incomplete_batch_can_be_kept():
    for samples, replicas, size in ((50, 1, 50), (50, 4, 52), (5, 1, 5)):
        options = {"drop_last": False, "replicas": replicas}
        shares = [list(TrainingSampler(samples, 12, rank=rank, **options)) for rank in range(replicas)]
        whole = [sample for step in zip(*shares, strict=True) for _, sample in step]
        assert len(whole) == size
        assert set(whole) == set(range(samples))
    # As torch's DistributedSampler pads before batches are cut, padding can complete a batch.
    assert (len(TrainingSampler(47, 12)), 4 * len(TrainingSampler(47, 12, replicas=4))) == (36, 48)


@pytest.mark.parametrize(
    ("batch_size", "replicas", "message"),
    [
        (64, 1, r"64 exceeds the 50 training samples.*set batch_size to 50 or less, or drop_last"),
        (10, 3, r"3 devices.*nearest valid sizes: 9 or 12"),
        (2, 4, "nearest valid sizes: 4"),
    ],
)
def test_impossible_batch_sizes_are_refused(batch_size, replicas, message):
    with pytest.raises(UserError, match=message):
        TrainingSampler(50, batch_size, replicas=replicas)


@pytest.mark.parametrize(("items", "replicas"), [(7, 2), (8, 2), (1, 4), (5, 5), (3, 1)])
def test_evaluation_covers_everything_with_equally_many_items_per_process(items, replicas):
    samplers = [EvaluationSampler(items, replicas=replicas, rank=rank) for rank in range(replicas)]
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(sampler) for sampler in samplers} == {-(-items // replicas)}
    assert set().union(*shares) == set(range(items))


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
def test_every_text_must_have_a_video(video_of_text, message):
    assert GroundTruth(torch.tensor([2, 0, 2]), 4, "MSVD", "test", "all captions").texts == 3
    with pytest.raises(ValueError, match=message):
        GroundTruth(video_of_text, 3, "MSVD", "test", "all captions")
