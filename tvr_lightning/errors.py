"""Base class of errors that a user can fix: the command line prints their message instead of a traceback."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent


class UserError(Exception):
    """Error outside the program: a file, an option, or missing weights.

    Subclasses also inherit from a built-in exception. `exit_status` is the exit status of the command line.
    """

    exit_status = 1


class MissingAssetError(UserError, FileNotFoundError):
    """Data or weights are missing; the message names them, the searched paths, and the expected contents."""


def check_present(checks: Iterable[Callable[[], object]]) -> None:
    """Call all checks for files, and report all missing files in one error.

    Raises:
        MissingAssetError: At least one check raised it; the message joins all messages.
    """
    absent = []
    for check in checks:
        try:
            check()
        except MissingAssetError as error:
            absent.append(str(error))
    if absent:
        raise MissingAssetError("\n\n".join(absent))


def refused_here(error: BaseException) -> bool:
    """Return whether a `raise` statement of this package raised the error, not a library or a bug."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not Path(trace.tb_frame.f_code.co_filename).is_relative_to(PACKAGE):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
