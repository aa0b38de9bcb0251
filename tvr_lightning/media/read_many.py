"""Reads many media files ahead of whoever takes them, in order, each with its own failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

from tvr_lightning.errors import UserError
from tvr_lightning.media.opening import MediaError
from tvr_lightning.media.workers import Failure, undisturbed, worker_context, worker_died
from tvr_lightning.progress import progress_bar

T = TypeVar("T")
R = TypeVar("R")
B = TypeVar("B")
_GROUP = 8  # items that `read_all` hands to a worker at a time


@dataclass(frozen=True)
class Unread(Generic[T]):
    """An item whose file cannot be read.

    Attributes:
        item: the item.
        reason: why, without the file's name.
    """

    item: T
    reason: str


def attempt(read: Callable[[T], R], item: T) -> R | Unread[T]:
    """Return `read(item)`, or why its file cannot be read."""
    try:
        return read(item)
    except MediaError as error:
        return Unread(item, error.reason)


def read_many(
    groups: Sequence[Sequence[T]],
    read: Callable[[T], R],
    join: Callable[[list[R | Unread[T]]], B],
    *,
    workers: int,
    threads: bool = False,
) -> Iterator[B]:
    """Yield `join` of what was read of each group, in order, while the next groups are read.

    Args:
        groups: items that are taken together.
        read: reads one item. A file that cannot be read, it says by a MediaError.
        join: makes one of what was read of a group, where it was read: tensors travel from processes one by one.
        workers: processes or threads that read ahead; with none, the caller reads.
        threads: whether they are threads, which start at once and share what `read` holds; else they are processes,
            which reading in Python does not slow down, and `read` and `join` must be picklable.

    Raises:
        UserError: what `read` raised besides, as it was raised.
        RuntimeError: `read` raised something else; it names the item.
        UserError: a worker process was killed.
    """
    if threads and workers:
        yield from _by_threads(groups, read, join, workers)
        return
    loader: DataLoader[B | Failure] = DataLoader(
        _Groups(groups, read, join),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=worker_context() if workers else None,
    )
    with undisturbed():
        batches = iter(loader)
    while True:
        try:
            batch = next(batches, None)
        except RuntimeError as error:
            died = worker_died(error)
            if died is None:
                raise
            raise died from error
        if batch is None:
            return
        if isinstance(batch, Failure):
            raise batch.error
        yield batch


def read_all(
    items: Sequence[T], read: Callable[[T], R], *, workers: int, title: str, progress: bool = True
) -> list[R | Unread[T]]:
    """Return `read(item)`, or why its file cannot be read, of every item in order.

    Args:
        items: what is read.
        read: a function that worker processes can import.
        workers: processes; 1 reads in this one.
        title: of the progress bar.
        progress: whether the bar is shown.

    Raises:
        ValueError: fewer than one worker.
        UserError, RuntimeError: as `read_many`.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    groups = [items[start : start + _GROUP] for start in range(0, len(items), _GROUP)]
    results: list[R | Unread[T]] = []
    with progress_bar(progress) as bar:
        task = bar.add_task(title, total=len(items))
        for group in read_many(groups, read, list, workers=0 if workers == 1 or len(groups) < 2 else workers):
            results += group
            bar.advance(task, len(group))
    return results


class _Groups(Dataset[Any]):
    def __init__(self, groups: Sequence[Sequence[T]], read: Callable[[T], R], join: Callable[..., B]) -> None:
        self.groups, self.read, self.join = groups, read, join

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, place: int) -> Any:
        # A DataLoader would raise another error in the place of the user's, with the worker's traceback as its message.
        found = []
        for item in self.groups[place]:
            try:
                found.append(attempt(self.read, item))
            except UserError as error:
                return Failure(error)
            except Exception as error:
                raise RuntimeError(f"{item}: {type(error).__name__}: {error}") from error
        return self.join(found)


def _by_threads(
    groups: Sequence[Sequence[Any]], read: Callable[[Any], Any], join: Callable[[list[Any]], B], workers: int
) -> Iterator[B]:
    """Read one group ahead."""
    with ThreadPoolExecutor(workers) as pool:
        ahead = [pool.submit(attempt, read, item) for group in groups[:1] for item in group]
        for place in range(len(groups)):
            current = ahead
            ahead = [pool.submit(attempt, read, item) for group in groups[place + 1 : place + 2] for item in group]
            yield join([future.result() for future in current])
