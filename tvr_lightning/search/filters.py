"""Which videos may be found, said in SQL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What SQLite folds itself is quick, and right for ASCII alone; the rest is folded by Python, row by row.
_ASCII = "length({0}) = length(CAST({0} AS BLOB))"
_CONTAINS = f"CASE WHEN {_ASCII} THEN instr(lower({{0}}), ?) ELSE instr(folded({{0}}), ?) END > 0".format("path")
_SAYS = f"CASE WHEN {_ASCII} AND NOT instr(lower({{0}}), ?) THEN 0 ELSE says({{0}}, ?) END".format("content")


@dataclass(frozen=True)
class Filter:
    """Which videos may be found.

    Attributes:
        shortest: seconds that a video lasts at least.
        longest: seconds that it lasts at most.
        path: what its path contains; upper and lower case are alike.
        caption: words that its captions contain, all of them in any order and case.
        folder: the folder that it lies in or below, as `Searcher.folders` names it.
    """

    shortest: float | None = None
    longest: float | None = None
    path: str | None = None
    caption: str | None = None
    folder: str | None = None

    def sql(self, roots: Sequence[Path] = ()) -> tuple[str, list[str | float]]:
        """Return a condition on the rows of `videos`, and its values.

        Args:
            roots: indexed files and folders, which `folder` lies below.
        """
        conditions: list[str] = ["TRUE"]
        values: list[str | float] = []
        for bound, condition in ((self.shortest, "duration >= ?"), (self.longest, "duration <= ?")):
            if bound is not None:
                conditions.append(condition)
                values.append(float(bound))
        if self.path:
            conditions.append(_CONTAINS)
            values += [self.path.casefold()] * 2
        if self.folder is not None:
            below = [f"{root / self.folder}/".replace("//", "/") for root in roots] or [self.folder]
            conditions.append(f"({' OR '.join(['substr(path, 1, ?) = ?'] * len(below))})")
            values += [value for prefix in below for value in (len(prefix), prefix)]
        for word in words_of(self.caption or ""):
            conditions.append(f"videos.id IN (SELECT id FROM captions WHERE {_SAYS})")
            values += [word] * 2
        return " AND ".join(conditions), values


def words_of(text: str) -> set[str]:
    """Return the words of a text, in lower case."""
    return set(re.findall(r"\w+", text.casefold()))
