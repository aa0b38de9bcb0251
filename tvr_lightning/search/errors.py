"""Errors of the search."""

from tvr_lightning.errors import UserError
from tvr_lightning.search.results import printable


class SearchError(UserError):
    """A query, an option, or an index cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))  # file names may contain control characters


class UnknownVideoError(SearchError):
    """The index does not contain the video."""


class UnreadableError(SearchError):
    """The files of the index cannot be read or written. The message names them, so it is not for clients."""
