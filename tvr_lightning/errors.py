"""The mark of errors that a user can mend: the command line prints their sentence instead of a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterable


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
