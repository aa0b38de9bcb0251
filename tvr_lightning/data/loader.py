"""DataLoaders and samplers: reproducible orders, equal shares of all processes, and resumption within an epoch."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.media.workers import batches_of, worker_context


class TrainingSampler(DistributedSampler[tuple[int, int]], SequentialSampler):
    """Sampler that shuffles the training samples and divides each global batch among the processes.

    It yields (epoch, sample) pairs, so that persistent workers know the epoch. The order depends only on seed and
    epoch: global batch k contains the same samples for any number of processes. As in torch's DistributedSampler,
    the first samples of the order are repeated at its end until their number is divisible by R. Process r (`rank`) of
    R (`replicas`) takes samples r, r + R, ... of every global batch of `batch_size`. Without `reshuffle`, all epochs
    have the order of epoch 0. The base classes are those that Lightning does not replace: SequentialSampler with
    `trainer.overfit_batches`.
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
        if batch_size % replicas:
            below = batch_size // replicas * replicas
            above = below + replicas
            raise UserError(
                f"batch_size {batch_size} is the global batch and {replicas} devices cannot share it evenly; "
                f"the nearest valid sizes: {f'{below} or ' if below else ''}{above}"
            )
        super().__init__(range(samples), replicas, rank, seed=seed)  # type: ignore[arg-type]  # only its length counts
        self.samples = samples
        self.batch_size = batch_size
        self.reshuffle = reshuffle
        self.read = self.total_size // batch_size * batch_size if drop_last else self.total_size
        self.consumed = 0

    def __len__(self) -> int:
        """Return the number of samples of a full epoch on this process, also after a resume in its middle."""
        return self.read // self.num_replicas

    def __iter__(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]  # SequentialSampler yields integers
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


class EvaluationSampler(DistributedSampler[int], SequentialSampler):
    """Sampler that distributes items 0 .. n-1 over the processes and repeats the first ones for equal shares.

    A process that runs out of batches early would leave the others waiting in collective operations. Repeated items
    are recognized by their index and dropped. Items are in the order of the split. With `shuffled`, a seed and a number
    of items, every epoch has a new order, in which this number of items of the split comes first.
    """

    def __init__(self, items: int, *, replicas: int = 1, rank: int = 0) -> None:
        super().__init__(range(items), replicas, rank, shuffle=False)  # type: ignore[arg-type]  # only its length counts
        self.items = items
        self.shuffled: tuple[list[int], int] | None = None

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Self:
        """Return the sampler of a loader of `evaluation_dataloaders`, which must be of this class."""
        if not isinstance(loader.sampler, cls):
            raise UserError(
                f"A loader of evaluation_dataloaders has a {type(loader.sampler).__name__}. Use {cls.__name__}."
            )
        return loader.sampler

    @override
    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.items)
        if self.shuffled is not None:
            seed, first = self.shuffled
            random = np.random.default_rng([*seed, self.epoch])
            order = np.concatenate([random.permutation(order[:first]), random.permutation(order[first:])])
        return iter(np.resize(order, self.total_size)[self.rank :: self.num_replicas].tolist())


class ReportingLoader(DataLoader[Any]):
    """DataLoader that raises the failures that its workers return, and lost workers, as UserErrors."""

    @classmethod
    def create(cls, dataset: Dataset[Any], sampler: Sampler[Any], batch_size: int, workers: int, seed: int) -> Self:
        """Return a loader over a dataset that reads whole batches (`SplitDataset`) in worker processes."""
        return cls(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=workers,
            # Workers of an evaluation end with it: together with those of training, they would fill the shared memory.
            persistent_workers=workers > 0 and cls is TrainingLoader,
            multiprocessing_context=worker_context() if workers else None,
            pin_memory=torch.cuda.is_available(),
            collate_fn=itemgetter(0),
            # A separate generator: starting an epoch must not consume random numbers of the one that drives dropout.
            generator=torch.Generator().manual_seed(seed),
        )

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # Lightning and torch only iterate it
        return batches_of(super().__iter__)


class TrainingLoader(ReportingLoader):
    """`ReportingLoader` over a `TrainingSampler` that tracks the progress of training.

    Only batches that were yielded count, not those that workers have prefetched. Lightning saves and restores the
    state with the run, so that a resumed epoch continues with the next batch of the interrupted run.
    """

    sampler: TrainingSampler
    before_next: Callable[[], None] | None = None
    """Function to call before the next batch of an epoch is read, when the step with the previous one is complete."""
    _epoch = 0
    _consumed = 0

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._epoch, self._consumed = self.sampler.epoch, self.sampler.consumed
        for batch in super().__iter__():
            self._consumed += self.sampler.batch_size
            yield batch
            if self.before_next is not None:
                self.before_next()

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its samples that were yielded, over all processes."""
        return {"epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from `state`. Raise UserError if the interrupted run had a batch size that does not fit."""
        self.sampler.load_state_dict(state)
        self._epoch, self._consumed = state["epoch"], state["consumed"]
