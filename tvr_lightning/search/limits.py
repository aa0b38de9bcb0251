"""What a server lets in: who asks, how much they send, how many wait."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from tvr_lightning.files import lock_open
from tvr_lightning.search.errors import GivenUpError, SearchError
from tvr_lightning.search.texts import GivenUp

COOKIE = "tvr_token"
UPLOADS = "tvr-search-"
T = TypeVar("T")


class TooManyError(SearchError):
    """More searches than may run and wait at once."""


class OverloadedError(SearchError):
    """More uploads than may be decoded and wait for it at once."""


class TooSlowError(SearchError):
    """An upload that takes longer than it may."""


class TooLargeError(SearchError):
    """An upload beyond the limit."""


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def shows_token(token: str, authorization: str | None, cookie: str | None) -> bool:
    """Whether a request shows the token, as `Authorization: Bearer ...` or in the cookie that the page sets."""
    given = [cookie or ""]
    if authorization and authorization.lower().startswith("bearer "):
        given.append(authorization[len("bearer ") :].strip())
    # Compared in constant time, so that answers do not tell how much of a guess is right.
    return any(hmac.compare_digest(value.encode(), token.encode()) for value in given)


class ConcurrencyLimit:
    """Lets a number of searches in; further ones are refused rather than queued without end.

    Args:
        places: how many may run and wait at once.
        what: they are called.
        error: what further ones get.
    """

    def __init__(self, places: int, what: str = "searches", error: type[SearchError] = TooManyError) -> None:
        if places < 1:
            raise SearchError(f"max_pending is {places}; it must be at least 1")
        self.places, self.what, self.error = places, what, error
        self.inside = 0
        self._lock = threading.Lock()

    def require_place(self) -> None:
        """Refuse early what would be refused later.

        Raises:
            TooManyError: no place is free, or another error that was asked for.
        """
        if self.inside >= self.places:
            raise self.error(f"{self.places} {self.what} are in progress or pending. Try again in a moment.")

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Take a place for as long as the block runs.

        Raises:
            TooManyError: none is free, or another error that was asked for.
        """
        with self._lock:
            self.require_place()
            self.inside += 1
        try:
            yield
        finally:
            with self._lock:
                self.inside -= 1


@contextlib.contextmanager
def upload_folder() -> Iterator[Path]:
    """Make a folder for an upload and remove it at the end; `sweep_uploads` knows by its lock that it is in use."""
    with tempfile.TemporaryDirectory(prefix=UPLOADS) as name:
        if os.name != "posix":  # where folders cannot be opened
            yield Path(name)
            return
        handle = os.open(name, os.O_RDONLY)
        try:
            lock_open(handle)
            yield Path(name)
        finally:
            os.close(handle)


def sweep_uploads(seconds: float = 60.0) -> None:
    """Remove folders of uploads whose server was killed.

    Args:
        seconds: since the last change of a folder; a younger one may not have its lock yet.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{UPLOADS}*") if os.name == "posix" else ():
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # somebody else's, or just removed
            continue
        try:
            state = os.fstat(handle)
            if state.st_uid == os.geteuid() and time.time() - state.st_mtime > seconds and lock_open(handle):
                shutil.rmtree(folder, ignore_errors=True)  # another server may do the same
        finally:
            os.close(handle)


async def while_wanted(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], pool: Executor, work: Callable[[GivenUp], T]
) -> T:
    """Run work in a thread for as long as the client that asks for it is there.

    Args:
        receive: gives the messages of the client's connection; its body must be read, or be none.
        pool: of threads.
        work: is given a function that says whether the client is gone. Where it has not begun, it never will.

    Raises:
        GivenUpError: the client left before the work began, or the work says so.
    """
    gone = threading.Event()
    task = pool.submit(work, gone.is_set)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        task.cancel()

    watcher = asyncio.create_task(watch())
    waiting = asyncio.wrap_future(task)
    try:
        await asyncio.wait([waiting])  # to its end, so that no place is free before its thread is
    finally:
        gone.set()
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    if task.cancelled():
        raise GivenUpError("the client disconnected")
    return waiting.result()


async def save_upload(
    chunks: AsyncIterator[bytes], path: Path, promised: str | None, most: int, seconds: float
) -> None:
    """Write an uploaded example to a file, no byte more than allowed and no longer than allowed.

    Args:
        chunks: of the body.
        path: the file.
        promised: the header Content-Length, where there is one.
        most: bytes.
        seconds: from the first byte to the last.

    Raises:
        TooLargeError: more than that is promised or comes.
        TooSlowError: it is not there in time.
        SearchError: nothing came, or less than promised.
    """
    too_large = TooLargeError(f"The clip is larger than {most / 2**20:g} MiB. Shorten it, or raise --max_upload_mib.")
    if promised is not None and promised.isdigit() and int(promised) > most:
        raise too_large
    size = 0

    async def write() -> None:
        nonlocal size
        with path.open("wb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > most:
                    raise too_large
                file.write(chunk)

    try:
        await asyncio.wait_for(write(), seconds)
    except TimeoutError as error:
        raise TooSlowError(f"The upload took longer than {seconds:g} seconds. Send a shorter clip.") from error
    if not size:
        raise SearchError("The upload is empty. Send the bytes of a video as the body.")
    if promised is not None and promised.isdigit() and size < int(promised):
        raise SearchError(f"The upload ended after {size} of {promised} bytes. Send it again.")
