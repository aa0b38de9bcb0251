"""Loaders of the bank: training texts and videos that serve as stand-ins for user queries in score normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from tvr_lightning.data.samplers import EvaluationSampler


def bank_loaders(loaders: Sequence[DataLoader[Any]], size: int, seed: int) -> list[DataLoader[Any]]:
    """Limit loaders of `evaluation_dataloaders("train")` to `size` items, sampled with the same seed in all processes.

    Items keep the order of the split and their indices in it, and every process has equally many batches.
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
