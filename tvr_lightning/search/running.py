"""How `tvr search` finds a `tvr serve` of the same index, which has everything loaded, and asks it.

While a server runs, a file in its user's state directory says where it listens. It does not lie in the index, which may
come from anybody and must not choose where queries are sent. The server holds a lock on the file, so that one which a
killed server left behind is known, and deleted, by the next search.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tvr_lightning._version import __version__
from tvr_lightning.files import lock_open, user_state
from tvr_lightning.quiet import is_verbose
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.question import Question
from tvr_lightning.search.results import Answer

ROUTE = "/owner/search"
HEADER = "X-Tvr-Key"
CATALOG = "catalog.sqlite"
TO_CONNECT, TO_ANSWER = 2.0, 120.0
"""Seconds after which a search gives a server up and starts by itself."""
REFUSED = 400
"""Status of a question that no server would answer otherwise."""


@contextlib.contextmanager
def announced(index: Path, host: str, port: int, key: str) -> Iterator[None]:
    """Let this user's searches find a server while the context lasts; where nothing can be written, they do without.

    Args:
        index: folder of the index.
        host: that the server is bound to.
        port: likewise.
        key: what searches must show.
    """
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError):
            _announce(index, host, port, key, undo)
        yield


def _announce(index: Path, host: str, port: int, key: str, undo: contextlib.ExitStack) -> None:
    folder = _folder()
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _entries("*")
    file = folder / f"{_same(index)}-{os.getpid()}-{port}.json"
    draft = file.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    undo.callback(os.close, descriptor)
    undo.callback(draft.unlink, missing_ok=True)
    if not lock_open(descriptor):  # nobody could tell whether the server lives
        return
    os.write(descriptor, json.dumps({"version": __version__, "host": host, "port": port, "key": key}).encode())
    draft.replace(file)
    undo.callback(file.unlink, missing_ok=True)


def ask(index: Path, question: Question) -> Answer | None:
    """Return what a running server of an index answers; None where none runs or it has no answer.

    Args:
        index: folder of the index.
        question: what to ask.

    Raises:
        SearchError: the question is one that no server answers; says why.
    """
    try:
        entries = _entries(_same(index))
    except OSError:  # no index
        return None
    for entry in entries:
        try:
            status, said = _asked(entry, question)
        except (OSError, http.client.HTTPException, ValueError):
            continue  # it has just ended, or is stuck
        if status == 200:
            if is_verbose():
                print(f"answered by the server at {entry['host']}:{entry['port']}", file=sys.stderr)
            return Answer.of(said)
        if status == REFUSED:
            raise SearchError(said["detail"])
    return None


def _asked(entry: dict[str, Any], question: Question) -> tuple[int, dict[str, Any]]:
    # What is bound to every address is reached by this machine's own.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(entry["host"], entry["host"])
    with contextlib.closing(http.client.HTTPConnection(host, entry["port"], timeout=TO_CONNECT)) as connection:
        connection.request("GET", "/health")
        if connection.getresponse().status != 200:
            raise OSError("no answer")
    with contextlib.closing(http.client.HTTPConnection(host, entry["port"], timeout=TO_ANSWER)) as connection:
        body = json.dumps(question.plain())
        connection.request("POST", ROUTE, body, {"Content-Type": "application/json", HEADER: entry["key"]})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def _entries(index: str) -> list[dict[str, Any]]:
    """Return what running servers of an index, or of any for `*`, say of themselves; files of dead ones are deleted."""
    found, folder = [], _folder()
    for file in sorted(folder.glob(f"{index}-*.json")) if folder is not None else ():
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:  # it has just ended
            continue
        try:
            if lock_open(descriptor):
                file.unlink(missing_ok=True)
                continue
            entry = json.loads(os.read(descriptor, 2**16))
        except (OSError, ValueError):
            continue
        finally:
            os.close(descriptor)
        if entry.get("version") == __version__:
            found.append(entry)
    return found


def _same(index: Path) -> str:
    """Return what tells this index from every other one, copies of it and what is made in its place included."""
    state = (index / CATALOG).stat()
    return f"{state.st_dev:x}-{state.st_ino:x}"


def _folder() -> Path | None:
    folder = user_state()
    return None if folder is None else folder / "servers"
