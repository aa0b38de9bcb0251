"""Which samples a process reads, in which order: reproducible, resumable, and equal in number on all processes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from tvr_lightning.errors import UserError

Position = tuple[int, int]


class _Numbered(Dataset[int]):
    """Stands in for a dataset of which DistributedSampler wants the length only."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> int:
        return index


class TrainingSampler(DistributedSampler[Position]):
    """Shuffle the training samples and share each global batch among the processes.

    Yields (epoch, sample) pairs, so that the epoch reaches workers that outlive one. The order depends on seed and
    epoch only: global batch k contains the same samples on one process and on many. As in torch's DistributedSampler,
    the first samples of the order follow its last ones until R divides their number. This class extends it so that
    Lightning does not replace it.

    Args:
        samples: Number of training samples.
        batch_size: Global batch size. Process r of R takes samples r, r + R, ... of every global batch.
        seed: Seed for the order.
        drop_last: Whether the last incomplete batch of an epoch is dropped.
        reshuffle: Whether every epoch has an order of its own. Otherwise all have that of epoch 0.
        replicas: R, the number of data-parallel processes.
        rank: r, this process.

    Raises:
        UserError: no complete batch exists although incomplete ones are dropped, or R does not divide the batch.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        drop_last: bool = True,
        reshuffle: bool = True,
        replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if drop_last and samples < batch_size:
            raise UserError(
                f"batch_size {batch_size} exceeds the {samples} training samples, so that no complete batch exists; "
                f"set batch_size to {samples} or less, or drop_last to false"
            )
        check_divisible(batch_size, replicas)
        super().__init__(_Numbered(samples), num_replicas=replicas, rank=rank, shuffle=True, seed=seed)
        self.samples = samples
        self.batch_size = batch_size
        self.reshuffle = reshuffle
        self.read = self.total_size // batch_size * batch_size if drop_last else self.total_size
        self.consumed = 0

    def __len__(self) -> int:
        """Samples of a whole epoch on this process, also when a resumed epoch starts in its middle."""
        return self.read // self.num_replicas

    def __iter__(self) -> Iterator[Position]:
        """Yield the (epoch, sample) pairs of this process; after a resume, only those not consumed yet."""
        random = np.random.default_rng([self.seed, self.epoch if self.reshuffle else 0])
        order = np.resize(random.permutation(self.samples), self.read)
        start, self.consumed = self.consumed, 0  # only the first epoch after a resume is cut short
        for sample in order[start + self.rank :: self.num_replicas]:
            yield self.epoch, int(sample)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; going to another epoch forgets a resume point."""
        if epoch != self.epoch:
            self.consumed = 0
        self.epoch = epoch

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next iteration in epoch `state["epoch"]` after its first `state["consumed"]` samples.

        Raises:
            ValueError: the samples consumed are not a whole number of global batches.
        """
        consumed = state["consumed"]
        if consumed % self.batch_size:
            raise ValueError(
                f"{consumed} consumed samples are not a multiple of the batch_size {self.batch_size}. Resume with the "
                "batch_size of the interrupted run, or from the end of an epoch."
            )
        self.epoch, self.consumed = state["epoch"], consumed


class EvaluationSampler(DistributedSampler[int]):
    """Deals items 0 .. n-1 over the processes, repeating the first ones so that all processes get equally many.

    A process that runs out of batches early would leave the others waiting in their collectives; repeated items are
    told by their index and dropped. Items come in the order of the split, unless `shuffle_items` was called.

    Args:
        items: n, number of items; at least one.
        replicas: number of data-parallel processes.
        rank: this process.
    """

    def __init__(self, items: int, *, replicas: int = 1, rank: int = 0) -> None:
        super().__init__(_Numbered(items), num_replicas=replicas, rank=rank, shuffle=False)
        self.items = items
        self._order: tuple[list[int], int] | None = None

    def shuffle_items(self, seed: list[int], first: int | None = None) -> None:
        """Deal the items in a random order from now on, another one in every epoch, so that arriving says nothing.

        Args:
            seed: with the epoch, decides the order; the same on every process.
            first: where no more than so many items will be read, these are the first ones, as without shuffling.
        """
        self._order = seed, self.items if first is None else min(first, self.items)

    def __len__(self) -> int:
        """Items of this process, the same on every process."""
        return -(-self.items // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Yield this process's items: those at rank, rank + R, ..., beginning again at the first where they end."""
        order = np.arange(self.items)
        if self._order is not None:
            seed, first = self._order
            random = np.random.default_rng([*seed, self.epoch])
            order = np.concatenate([random.permutation(order[:first]), random.permutation(order[first:])])
        return iter([int(order[(self.rank + step * self.num_replicas) % self.items]) for step in range(len(self))])


def check_divisible(batch_size: int, replicas: int) -> None:
    """Check that a global batch can be shared out evenly.

    Raises:
        UserError: it cannot; the message names the nearest sizes that can.
    """
    if batch_size % replicas:
        below, above = batch_size // replicas * replicas, -(-batch_size // replicas) * replicas
        nearest = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"batch_size {batch_size} is the global batch and {replicas} devices cannot share it evenly; "
            f"the nearest valid sizes: {nearest}"
        )
