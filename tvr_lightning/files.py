"""Atomic writing of files, and locks that the operating system releases when their process ends."""

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
"""Suffix of a file that is being written; a killed process may leave such a file."""
# Errors on disks without file locks: NFS without its lock service, Lustre mounted without flock, some FUSE mounts.
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=2)


@contextmanager
def held(file: Path, busy: UserError, advice: str, say: Callable[[str], None] = _warn) -> Iterator[None]:
    """Lock a file inside the context. On a disk without file locks, report this and continue.

    Args:
        file: Lock file in an existing folder; it is created if missing, and may stay.
        busy: Error to raise if another process has locked the file.
        advice: Advice for disks without file locks, such as "start no second tvr index on it".
        say: Function that reports the advice; by default, a warning.

    Raises:
        OSError: The lock file cannot be opened.
    """
    # filelock's fallback without flock treats the existing file as the lock, which would remain locked if a process on
    # another machine is killed. Any thread may leave the context.
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
    """Return a fix for an error while writing a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free disk space"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f)"
    return "check its permissions"


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically, and flush it to disk before it gets its name.

    Raises:
        OSError: The file cannot be written; an existing file with this name is unchanged.
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
    if os.name == "posix":  # the rename itself must reach the disk before the next step depends on it
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def user_state() -> Path | None:
    """Return the folder of the user's state, which may not exist, or None without a home directory."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "tvr_lightning"
    except RuntimeError:
        return None


def lock_open(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed or its process ends, to mark it as in use.

    Returns:
        Whether this process now has the lock. False if another process has it, or if the disk or the operating system
        does not support such locks.
    """
    try:
        fcntl: Any = importlib.import_module("fcntl")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ImportError):
        return False
    return True
