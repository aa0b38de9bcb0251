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
from tvr_lightning.search.errors import GivenUpError, optional
from tvr_lightning.search.texts import GivenUp

optional("fastapi", "tvr serve")
from fastapi import HTTPException  # noqa: E402

COOKIE = "tvr_token"
UPLOADS = "tvr-search-"
RETRY_AFTER = 5
"""Seconds after which a refused client may try again."""
T = TypeVar("T")


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
    """Maximum number of running and pending requests; further ones are refused.

    Args:
        places: Maximum number.
        what: Name of the requests in messages.
        status: HTTP status of a refusal.
    """

    def __init__(self, places: int, what: str = "searches", status: int = 429) -> None:
        self.places, self.what, self.status = places, what, status
        self.inside = 0
        self._lock = threading.Lock()

    def require_place(self) -> None:
        """Refuse early what would be refused later."""
        if self.inside >= self.places:
            detail = f"{self.places} {self.what} are in progress or pending. Try again in a moment."
            raise HTTPException(self.status, detail, {"Retry-After": str(RETRY_AFTER)})

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Take a place while the block runs."""
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
    """Write an upload to a file.

    Args:
        chunks: Chunks of the body.
        path: the file.
        promised: Header Content-Length, if present.
        most: Maximum number of bytes.
        seconds: Time limit from the first byte to the last.

    Raises:
        HTTPException: The upload is empty, incomplete, too large, or too slow.
    """
    too_large = HTTPException(
        413, f"The clip is larger than {most / 2**20:g} MiB. Shorten it, or raise --max_upload_mib."
    )
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
        raise HTTPException(408, f"The upload took longer than {seconds:g} seconds. Send a shorter clip.") from error
    if not size:
        raise HTTPException(400, "The upload is empty. Send the bytes of a video as the body.")
    if promised is not None and promised.isdigit() and size < int(promised):
        raise HTTPException(400, f"The upload ended after {size} of {promised} bytes. Send it again.")
