"""Reading of many media files ahead of their use, in order, with errors per file."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from tvr_lightning.errors import UserError
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.workers import batches_of, worker_context
from tvr_lightning.progress import progress_bar

T = TypeVar("T")
R = TypeVar("R")
B = TypeVar("B")
_GROUP = 8  # number of items that `read_all` passes to a worker at a time


def attempt(read: Callable[[T], R], item: T) -> R | MediaError:
    """Return `read(item)`, or the error if its file cannot be read."""
    try:
        return read(item)
    except MediaError as error:
        return MediaError(error.path, error.reason)  # without the traceback, which keeps decoded frames in memory


def read_many(
    groups: Sequence[Sequence[T]],
    read: Callable[[T], R],
    join: Callable[[list[R | MediaError]], B],
    *,
    workers: int,
) -> Iterator[B]:
    """Yield `join` of the results of each group, in order, while worker processes read the next groups.

    `read` raises MediaError if a file cannot be read. Any other error ends the iteration.
    `join` also runs in the worker, since processes send tensors one by one. With 0 workers, the caller reads.
    """
    loader: DataLoader[Any] = DataLoader(
        groups,  # type: ignore[arg-type]  # of which it needs the length and the items
        batch_size=None,
        collate_fn=partial(_read_group, read, join),
        num_workers=workers,
        multiprocessing_context=worker_context() if workers else None,
    )
    return batches_of(loader.__iter__)


def _read_group(read: Callable[[T], R], join: Callable[[list[R | MediaError]], B], group: Sequence[T]) -> B | UserError:
    try:
        return join([attempt(read, item) for item in group])
    except UserError as error:
        return error


def read_all(
    items: Sequence[T], read: Callable[[T], R], *, workers: int, title: str, progress: bool = True
) -> list[R | MediaError]:
    """Return, for every item in order, `read(item)` or the error if its file cannot be read.

    Worker processes import `read`; with 1 worker, this process reads.
    """
    groups = [items[start : start + _GROUP] for start in range(0, len(items), _GROUP)]
    processes = 0 if workers == 1 or len(groups) < 2 else workers
    with progress_bar(progress) as bar:
        results = (result for group in read_many(groups, read, list, workers=processes) for result in group)
        return list(bar.track(results, total=len(items), description=title))
