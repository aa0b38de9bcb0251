"""The mark of errors that a user can mend: the command line prints their sentence instead of a traceback."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent


class UserError(Exception):
    """Something outside the program is wrong: a file, an option, missing weights.

    Errors that say so inherit from it beside a built-in exception, e.g. `class VideoError(UserError, ValueError)`.

    Attributes:
        exit_status: what the command line ends with.
    """

    exit_status = 1


class MissingAssetError(UserError, FileNotFoundError):
    """Data or weights are not there; the message says what, where it was looked for, and what is expected."""


def check_present(checks: Iterable[Callable[[], object]]) -> None:
    """Call what looks for files, all of it, and say at once what is not there.

    Raises:
        MissingAssetError: with the sentences of all that raised one.
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
    """Whether this package's own code said that it will not go on, with a sentence, and no library or mistake did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not Path(trace.tb_frame.f_code.co_filename).is_relative_to(PACKAGE):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
