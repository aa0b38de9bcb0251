"""Loaders of the bank: training texts and videos that stand for the queries of users in score normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from tvr_lightning.data.samplers import EvaluationSampler


def bank_loaders(loaders: Sequence[DataLoader[Any]], size: int, seed: int) -> list[DataLoader[Any]]:
    """Limit evaluation loaders to a random part of their items.

    Args:
        loaders: such as `evaluation_dataloaders("train")` gives, each with an `EvaluationSampler`.
        size: most items of each; loaders with no more are returned as they are.
        seed: of the draw; all processes draw alike.

    Returns:
        Loaders that give the drawn items, in the order of the split and with their places in it, equally many on every
        process.
    """
    return [_limited(loader, size, seed) for loader in loaders]


def _limited(loader: DataLoader[Any], size: int, seed: int) -> DataLoader[Any]:
    dataset: Any = loader.dataset
    if len(dataset) <= size:
        return loader
    drawn = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:size].sort().values.tolist()
    sampler = loader.sampler
    assert isinstance(sampler, EvaluationSampler)
    return type(loader)(  # it may raise what its workers report
        Subset(dataset, drawn),
        batch_size=loader.batch_size,
        sampler=EvaluationSampler(size, replicas=sampler.num_replicas, rank=sampler.rank),
        num_workers=loader.num_workers,
        multiprocessing_context=loader.multiprocessing_context,
        pin_memory=loader.pin_memory,
        collate_fn=loader.collate_fn,
    )
