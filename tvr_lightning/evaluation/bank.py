"""Loaders of the bank: training texts and videos that serve as stand-ins for user queries in score normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from tvr_lightning.data.samplers import EvaluationSampler


def bank_loaders(loaders: Sequence[DataLoader[Any]], size: int, seed: int) -> list[DataLoader[Any]]:
    """Limit evaluation loaders to a random subset of their items.

    Args:
        loaders: Loaders such as those of `evaluation_dataloaders("train")`, each with an `EvaluationSampler`.
        size: Maximum number of items of each loader. Loaders with no more items are returned unchanged.
        seed: Seed for the subset, which is the same in all processes.

    Returns:
        Loaders of the sampled items, in the order of the split and with their indices in it, with equally many batches
        in every process.
    """
    limited = []
    for loader in loaders:
        dataset: Any = loader.dataset
        if len(dataset) > size:
            drawn = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:size].sort().values
            sampler = loader.sampler
            assert isinstance(sampler, EvaluationSampler)
            loader = type(loader)(  # a subclass may re-raise errors of its workers
                Subset(dataset, drawn.tolist()),
                batch_size=loader.batch_size,
                sampler=EvaluationSampler(size, replicas=sampler.num_replicas, rank=sampler.rank),
                num_workers=loader.num_workers,
                multiprocessing_context=loader.multiprocessing_context,
                pin_memory=loader.pin_memory,
                collate_fn=loader.collate_fn,
            )
        limited.append(loader)
    return limited
