"""Reading of many media files ahead of their use, in order, with errors per file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

from tvr_lightning.errors import UserError
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.workers import Failure, undisturbed, worker_context, worker_died
from tvr_lightning.progress import progress_bar

T = TypeVar("T")
R = TypeVar("R")
B = TypeVar("B")
_GROUP = 8  # number of items that `read_all` passes to a worker at a time


@dataclass(frozen=True)
class Unread(Generic[T]):
    """An item whose file cannot be read.

    Attributes:
        item: The item.
        reason: Reason, without the file name.
    """

    item: T
    reason: str


def attempt(read: Callable[[T], R], item: T) -> R | Unread[T]:
    """Return `read(item)`, or the reason why its file cannot be read."""
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
    """Yield `join` of the results of each group, in order, while the next groups are read.

    Args:
        groups: Items that are joined.
        read: Function that reads one item. It raises MediaError if a file cannot be read.
        join: Function that combines the results of a group. It runs in the worker, since processes send tensors one by
            one.
        workers: Number of processes or threads that read ahead. With 0, the caller reads.
        threads: Whether to use threads, which start immediately and share the state of `read`. Otherwise processes are
            used, which run Python code in parallel; `read` and `join` must be picklable.

    Raises:
        UserError: `read` raised it, or a worker process was killed.
        RuntimeError: `read` raised another error. The message names the item.
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
    """Return, for every item in order, `read(item)` or the reason why its file cannot be read.

    Worker processes import `read`; with 1 worker, this process reads.
    """
    if workers < 1:
        raise UserError(f"workers is {workers}; it must be at least 1")
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
        # A DataLoader would replace the UserError with another error whose message is the worker's traceback.
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
    """Read one group ahead with threads."""
    with ThreadPoolExecutor(workers) as pool:
        ahead = [pool.submit(attempt, read, item) for group in groups[:1] for item in group]
        for place in range(len(groups)):
            current = ahead
            ahead = [pool.submit(attempt, read, item) for group in groups[place + 1 : place + 2] for item in group]
            yield join([future.result() for future in current])
