"""DataLoaders that preserve the errors of their workers, and one that resumes in the middle of an epoch."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from tvr_lightning.data.samplers import TrainingSampler
from tvr_lightning.errors import UserError
from tvr_lightning.media.workers import Failure, batches_of, worker_context


class ReportingDataset(Dataset[Any]):
    """Wrapper of a dataset that returns a `Failure` instead of raising an error that a user can fix.

    A DataLoader would replace the error with another one whose message is the worker's traceback.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except UserError as error:
            return Failure(error)


def collate(items: Sequence[Any]) -> Any:
    """Return records of one item each as one batch, or the first failure among them."""
    failed = next((item for item in items if isinstance(item, Failure)), None)
    return type(items[0]).cat(items) if failed is None else failed


class ReportingLoader(DataLoader[Any]):
    """DataLoader over a `ReportingDataset` that raises returned failures, and lost workers, as UserErrors."""

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # Lightning and torch only iterate it
        return batches_of(super().__iter__)


class TrainingLoader(ReportingLoader):
    """`ReportingLoader` over a `TrainingSampler` that tracks the progress of training.

    Only batches that were yielded count, not those that workers have prefetched. Lightning saves and restores the
    state with the run, so that a resumed epoch continues with the next batch of the interrupted run.
    """

    sampler: TrainingSampler
    waited = 0.0
    """Seconds that the consumer has waited for batches so far."""
    before_next: Callable[[], None] | None = None
    """Function to call before the next batch of an epoch is read, when the step with the previous one is complete."""
    _epoch = 0
    _consumed = 0

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._epoch, self._consumed = self.sampler.epoch, self.sampler.consumed
        batches = super().__iter__()
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
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


L = TypeVar("L", bound=ReportingLoader)


def make_loader(
    kind: type[L], dataset: Dataset[Any], sampler: Sampler[Any], batch_size: int, workers: int, seed: int
) -> L:
    """Return a loader of a kind over a dataset, which is read by this number of worker processes."""
    return kind(
        ReportingDataset(dataset),
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        # Workers of an evaluation end with it: together with those of training, they would fill the shared memory.
        persistent_workers=workers > 0 and kind is TrainingLoader,
        multiprocessing_context=worker_context() if workers else None,
        pin_memory=torch.cuda.is_available(),
        collate_fn=collate,
        # A separate generator: starting an epoch must not consume random numbers of the one that drives dropout.
        generator=torch.Generator().manual_seed(seed),
    )
