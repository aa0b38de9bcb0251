"""Base class of errors that a user can fix: the command line prints their message instead of a traceback."""

from collections.abc import Callable, Iterable


class UserError(ValueError):
    """Error that a user can fix: an option, a file, or missing weights."""

    exit_status = 1
    """Exit status of the command line."""


class MissingAssetError(UserError):
    """Data or weights are missing; the message names them, the searched paths, and the expected contents."""


def check_present(checks: Iterable[Callable[[], object]]) -> None:
    """Call all checks for files, and report all missing files in one MissingAssetError."""
    missing = []
    for check in checks:
        try:
            check()
        except MissingAssetError as error:
            missing.append(str(error))
    if missing:
        raise MissingAssetError("\n\n".join(missing))
