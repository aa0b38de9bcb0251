"""Errors that a user can fix: the command line prints their message instead of a traceback."""

import errno
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Errors of writing on a full or read-only disk."""


class UserError(ValueError):
    """Error that a user can fix: an option, a file, or missing weights."""

    exit_status = 2
    """Exit status of the command line, as of argparse. Commands return 1 if what they examined has problems."""


class MissingAssetError(UserError):
    """Data or weights are missing; the message names them, the searched paths, and the expected contents."""


def optional(library: str, extra: str, need: str) -> Any:
    """Import a library of an extra; the error states what needs it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UserError(f"{need} needs {library.replace('_', '-')}: pip install 'tvr-lightning[{extra}]'") from error


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


def abbreviated(items: Sequence[object], most: int = 5, separator: str = ", ") -> str:
    """Return the first items of a sequence for a message, such as `v1, v2, v3, v4, v5 and 9 more`."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{separator.join(map(str, items[:most]))}{more}"
