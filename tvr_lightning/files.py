"""Atomic writing of files, locks that the operating system releases when their process ends, and journals."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from tvr_lightning.errors import UserError

TEMPORARY = ".writing"
"""Suffix of a file that is being written; a killed process may leave such a file."""
# Errors on disks without file locks: NFS without its lock service, Lustre mounted without flock, some FUSE mounts.
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def file_lock(
    file: Path, what: str, kind: type[UserError] = UserError, report: Callable[[str], None] = warnings.warn
) -> Iterator[None]:
    """Lock a file in an existing folder inside the context; the file is created if missing, and may stay.

    `what` is written under the lock, such as "the index my-index". If another process has locked the file, raise a
    `kind` of error; on a disk without file locks, `report` this and continue.
    """
    # filelock's fallback without flock treats the existing file as the lock, which would remain locked if a process on
    # another machine is killed. Any thread may leave the context.
    lock = FileLock(file, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise kind(f"Another process is writing {what}. Wait for it or stop it.") from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        report(f"{file.parent} is on a disk without file locks ({error}): do not start a second process for {what}")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the end of the context, if it runs in the main thread; no other thread is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def explain_write_errors(
    file: Path, kept: str = "Earlier entries are kept.", rerun: str = "the command."
) -> Iterator[None]:
    """Turn an OSError into a UserError that states what is `kept`, a fix, and the command to rerun."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror or error}. {kept} To resume, free disk space, or check its "
            f"permissions and the file size limit (ulimit -f), and rerun {rerun}"
        ) from error


@contextmanager
def replace_whole(file: Path) -> Iterator[IO[bytes]]:
    """Open a file that atomically replaces `file` after it is flushed to disk; on an error, an existing file stays."""
    temporary = file.with_name(file.name + TEMPORARY)
    try:
        with temporary.open("wb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(file.parent, os.O_RDONLY)  # the rename must reach the disk before the next step depends on it
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically."""
    with replace_whole(file) as target:
        target.write(content)


@dataclass
class Journal:
    """Append-only file of JSON lines for long work: if the process is killed, only the line being written is lost.

    `header` is the first line, the settings with which the journal was created, and `entries` are the other lines.
    """

    file: Path
    header: Any
    entries: list[Any]
    _target: IO[bytes]

    @classmethod
    @contextmanager
    def open(cls, file: Path, header: Any, what: str) -> Iterator[Journal]:
        """Lock a journal of `what`, such as "the captions a.parquet", inside the context; create it if missing."""
        with ExitStack() as stack:
            with explain_write_errors(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(file_lock(file.with_name(f"{file.name}.lock"), what))
                lines, length = read_journal(file)
                # With a buffer, closing the file would try to write again and fail again on a full disk.
                target = stack.enter_context(file.open("ab", buffering=0))
                target.truncate(length)
                journal = cls(file, lines[0] if lines else header, lines[1:], target)
                if not lines:
                    journal._write(header)
            yield journal

    def append(self, entry: Any) -> None:
        """Append an entry and flush it to disk."""
        with explain_write_errors(self.file):
            self._write(entry)
        self.entries.append(entry)

    def rewrite(self, entries: Iterable[Any]) -> None:
        """Replace all entries atomically, at the end of the work."""
        self.entries = list(entries)
        with explain_write_errors(self.file):
            write_whole(self.file, b"".join(map(_line, [self.header, *self.entries])))

    def _write(self, entry: Any) -> None:
        line = memoryview(_line(entry))
        while line:  # a disk that becomes full first accepts a part
            line = line[self._target.write(line) :]
        os.fsync(self._target.fileno())


def _line(entry: Any) -> bytes:
    return (json.dumps(entry) + "\n").encode()


def read_journal(file: Path) -> tuple[list[Any], int]:
    """Return the complete lines of a journal, its header first, and their size in bytes; ([], 0) without a file."""
    content = file.read_bytes() if file.is_file() else b""
    length = content.rfind(b"\n") + 1  # a killed process may leave an incomplete last line
    try:
        return [json.loads(line) for line in content[:length].splitlines()], length
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}). Delete it and rerun the command.") from error
