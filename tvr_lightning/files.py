"""Files that appear whole, and locks that one process holds at a time and the system drops however it ends."""

from __future__ import annotations

import errno
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tvr_lightning.errors import UserError

TEMPORARY = ".writing"
"""What a file's name ends with until the file is whole; a kill may leave one behind."""
# What disks without file locks answer: NFS without its lock service, Lustre mounted without flock, some FUSE mounts.
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=2)


@contextmanager
def held(file: Path, busy: UserError, advice: str, say: Callable[[str], None] = _warn) -> Iterator[None]:
    """Hold a lock while the context lasts; on a disk without file locks, say so and go on.

    Args:
        file: lock file in a folder that is there; made where it is absent, and it may stay.
        busy: raised where another process holds the lock.
        advice: what to keep from where nothing can be locked, such as "start no second tvr index on it".
        say: takes that sentence; by default it is a warning.

    Raises:
        OSError: the lock file cannot be opened.
    """
    # A lock file that is taken for the lock itself, as filelock would have it where there is no flock, would outlive a
    # holder that was killed on another machine. Any thread may leave the context.
    lock = FileLock(file, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise busy from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        say(f"{file.parent} is on a disk without file locks ({error}): {advice}")
    try:
        yield
    finally:
        lock.release()


def remedy(error: OSError) -> str:
    """Say what helps where a file could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free disk space"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f)"
    return "check its permissions"


def write_whole(file: Path, content: bytes) -> None:
    """Write a file so that it appears whole, under its name, and only once it is on the disk.

    Raises:
        OSError: it cannot be written; what had the name before is left as it was.
    """
    temporary = file.with_name(file.name + TEMPORARY)
    try:
        with temporary.open("wb") as target:
            target.write(content)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename itself must reach the disk before the next step counts on it
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def user_state() -> Path | None:
    """Return the folder of what is remembered for this user, which may not be there; None without a home directory."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "tvr_lightning"
    except RuntimeError:
        return None


def lock_open(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed or its process dies, so that others can tell that it is in use.

    Returns:
        Whether this process holds it now. False where another one does, and where the disk or the system has no such
        locks, so that nobody can tell.
    """
    try:
        fcntl: Any = importlib.import_module("fcntl")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ImportError):
        return False
    return True
