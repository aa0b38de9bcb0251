"""Uploaded examples, kept in memory under an ID so that later requests can use them."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict

from tvr_lightning.search.ranking import Example

EXAMPLES_KEPT = 256
"""Examples whose features stay in memory, so that a page can ask by them again."""


class Examples:
    """Examples by id; the oldest make room for new ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Example] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, example: Example) -> str:
        """Keep an example and return its ID, a random one."""
        with self._lock:
            name = secrets.token_hex(8)
            self._kept[name] = example
            while len(self._kept) > EXAMPLES_KEPT:
                self._kept.popitem(last=False)
        return name

    def get(self, name: str) -> Example | None:
        """Return an example, None where it is none, or no more."""
        with self._lock:
            return self._kept.get(name)
