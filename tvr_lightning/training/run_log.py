"""What a run said, kept in its folder: the lines of the screen without its bars."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tvr_lightning.quiet import OwnWords

FILE = "log.txt"
LOGGERS = ("lightning.pytorch", "lightning.fabric")
_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Borders of tables are of the same character all along; a bar has figures beside it, or on the line below.
_BAR = re.compile(r"[━╸╺].*\d|\brun left: ")


class _Log:
    """Takes what is written in any pieces and appends whole lines, once the run has made its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._partial: dict[object, str] = {}
        self._waiting: list[str] = []

    def take(self, origin: object, text: str) -> None:
        *lines, self._partial[origin] = (self._partial.get(origin, "") + text).split("\n")
        for line in lines:
            shown = _CODES.sub("", line.rpartition("\r")[2]).rstrip()
            if not _BAR.search(shown):
                self._waiting.append(shown)
        if self.folder.is_dir():
            self.flush()

    def flush(self) -> None:
        if self._waiting and self.folder.is_dir():
            with (self.folder / FILE).open("a", encoding="utf-8", errors="replace") as target:
                target.writelines(f"{line}\n" for line in self._waiting)
            self._waiting.clear()


class _Shown:
    """A stream that also tells the log what is written to it."""

    def __init__(self, stream: TextIO, log: _Log) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.take(self, text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Handler(logging.Handler):
    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log
        self.addFilter(OwnWords())

    def emit(self, record: logging.LogRecord) -> None:
        self._log.take(self, f"{record.getMessage()}\n")


@contextmanager
def kept(folder: Path | None) -> Iterator[None]:
    """Append what is said meanwhile to `log.txt` in a run's folder, if there is one in the end.

    Args:
        folder: of the run; None keeps nothing.
    """
    if folder is None:
        yield
        return
    log = _Log(folder)
    handler, streams = _Handler(log), (sys.stdout, sys.stderr)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    sys.stdout, sys.stderr = _Shown(sys.stdout, log), _Shown(sys.stderr, log)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)
        log.flush()
