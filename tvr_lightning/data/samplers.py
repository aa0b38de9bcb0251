"""Samplers whose order is reproducible and resumable, with equally many samples on all processes."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from tvr_lightning.errors import UserError


class TrainingSampler(DistributedSampler[tuple[int, int]]):
    """Sampler that shuffles the training samples and divides each global batch among the processes.

    It yields (epoch, sample) pairs, so that persistent workers know the epoch. The order depends only on seed and
    epoch: global batch k contains the same samples for any number of processes. As in torch's DistributedSampler,
    the first samples of the order are repeated at its end until their number is divisible by R. The class extends
    DistributedSampler so that Lightning does not replace it.

    Args:
        samples: Number of training samples.
        batch_size: Global batch size. Process r of R takes samples r, r + R, ... of every global batch.
        seed: Seed for the order.
        drop_last: Whether the last incomplete batch of an epoch is dropped.
        reshuffle: Whether every epoch has a new order. Otherwise all have the order of epoch 0.
        replicas: Number of data-parallel processes R.
        rank: Index r of this process.
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
        super().__init__(range(samples), replicas, rank, seed=seed)  # type: ignore[arg-type]  # only its length counts
        self.samples = samples
        self.batch_size = batch_size
        self.reshuffle = reshuffle
        self.read = self.total_size // batch_size * batch_size if drop_last else self.total_size
        self.consumed = 0

    def __len__(self) -> int:
        """Return the number of samples of a full epoch on this process, also after a resume in its middle."""
        return self.read // self.num_replicas

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the (epoch, sample) pairs of this process; after a resume, only those not consumed yet."""
        random = np.random.default_rng([self.seed, self.epoch if self.reshuffle else 0])
        order = np.resize(random.permutation(self.samples), self.read)
        start, self.consumed = self.consumed, 0  # only the first epoch after a resume is shortened
        for sample in order[start + self.rank :: self.num_replicas]:
            yield self.epoch, int(sample)

    @override
    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:  # it discards a resume point
            self.consumed = 0
        self.epoch = epoch

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next iteration in epoch `state["epoch"]` after its first `state["consumed"]` samples."""
        if state["consumed"] % self.batch_size:
            raise UserError(
                f"{state['consumed']} consumed samples are not a multiple of the batch_size {self.batch_size}. Resume "
                "with the batch_size of the interrupted run, or from the end of an epoch."
            )
        self.epoch, self.consumed = state["epoch"], state["consumed"]


class EvaluationSampler(DistributedSampler[int]):
    """Sampler that distributes items 0 .. n-1 over the processes and repeats the first ones for equal shares.

    A process that runs out of batches early would leave the others waiting in collective operations. Repeated items
    are recognized by their index and dropped. Items are in the order of the split, unless `shuffle_items` was called.
    """

    def __init__(self, items: int, *, replicas: int = 1, rank: int = 0) -> None:
        super().__init__(range(items), replicas, rank, shuffle=False)  # type: ignore[arg-type]  # only its length counts
        self.items = items
        self._order: tuple[list[int], int] | None = None

    def shuffle_items(self, seed: list[int], first: int) -> None:
        """Use a new order in every epoch, from a seed, in which the first items of the split come first."""
        self._order = seed, first

    @override
    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.items)
        if self._order is not None:
            seed, first = self._order
            random = np.random.default_rng([*seed, self.epoch])
            order = np.concatenate([random.permutation(order[:first]), random.permutation(order[first:])])
        return iter(np.resize(order, self.total_size)[self.rank :: self.num_replicas].tolist())


def check_divisible(batch_size: int, replicas: int) -> None:
    """Raise UserError, with the nearest valid sizes, unless the processes can share a global batch evenly."""
    if batch_size % replicas:
        below, above = batch_size // replicas * replicas, -(-batch_size // replicas) * replicas
        nearest = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"batch_size {batch_size} is the global batch and {replicas} devices cannot share it evenly; "
            f"the nearest valid sizes: {nearest}"
        )
