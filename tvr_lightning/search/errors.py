"""Errors of the search that a user can mend, and what is said where an optional package is absent."""

from __future__ import annotations

import importlib
from types import ModuleType

from tvr_lightning.errors import UserError


class SearchError(UserError, ValueError):
    """A query, an option or an index that cannot be used as it is; says what is wrong and what helps."""


class RefusedError(SearchError):
    """Refusal before anything is changed."""

    exit_status = 2  # as argparse


class UnknownVideoError(SearchError):
    """There is no such video in the index."""


class GivenUpError(SearchError):
    """Nobody waits for the answer any more, and no more is computed for it."""


class BusyError(SearchError):
    """Another process writes the index, or holds its file."""


def optional(module: str, purpose: str) -> ModuleType:
    """Import a module of the extra `search`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SearchError(
            f"{purpose} needs the package {module.partition('.')[0]} ({error}). Install it with "
            "pip install 'tvr-lightning[search]'"
        ) from error
