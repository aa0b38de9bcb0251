"""The share of the training split that a bank of texts or videos reads."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from tvr_lightning.data.loader import EvaluationSampler
from tvr_lightning.evaluation.loop import bank_loaders


def loader(items, replicas=1, rank=0):
    sampler = EvaluationSampler(items, replicas=replicas, rank=rank)
    return DataLoader(TensorDataset(torch.arange(items)), batch_size=2, sampler=sampler)


def items_of(loaders):
    (found,) = loaders
    return torch.cat([batch[0] for batch in found]).tolist()


def test_a_bank_is_sampled_from_the_whole_split_and_shared_by_processes():
    drawn = items_of(bank_loaders([loader(40)], 7, 0))
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 7
    assert max(drawn) > 20 > min(drawn)
    shares = [items_of(bank_loaders([loader(40, 2, rank)], 7, 0)) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == 4
    assert sorted(set(shares[0] + shares[1])) == drawn
    assert items_of(bank_loaders([loader(40)], 7, 1)) != drawn
    small = loader(5)
    assert bank_loaders([small], 5, 0) == [small]
