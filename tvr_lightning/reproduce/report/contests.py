"""The query browser: on which queries one run beats another, and what the other one found in their place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup

from tvr_lightning.reproduce.report.figures.drawing import Arrays, picture_of
from tvr_lightning.reproduce.runs.card import Card, read_ranks


@dataclass(frozen=True)
class Contest:
    """The runs that ranked the same queries.

    Attributes:
        title: of the dataset.
        runs: `key` and `words` of each.
        better: `better[i][j]`, on how many queries run i ranks the right video higher than run j.
        queries: how many there are.
        shown: place of a query to its `caption`, the `right` video and the `ranks` of the runs.
        failures: of each run, place of a query to the video that it found in place of the right one.
        pictures: name of a video to its frames as a data URI.
    """

    title: str
    runs: list[dict[str, str]]
    better: list[list[int]]
    queries: int
    shown: dict[int, dict[str, Any]]
    failures: list[dict[int, str]]
    pictures: dict[str, str]


def contests_of(runs: Sequence[tuple[Card, Arrays]], cards: Path) -> list[Contest]:
    """Return what there is to browse: one contest for each dataset that two runs ranked the same queries of.

    Args:
        runs: finished, with the arrays of their figures.
        cards: folder of the cards, for the ranks.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[Card, Arrays, torch.Tensor]]] = {}
    for card, arrays in runs:
        if "failures.query" in arrays:
            ranks, _ = read_ranks(card.key, cards, "text_to_video")
            group = str(card.run["fingerprints"]["data"]), tuple(ranks.index.tolist())
            groups.setdefault(group, []).append((card, arrays, ranks.expected()))
    return [_contest(list(index), own) for (_, index), own in groups.items() if len(own) > 1]


def _contest(index: list[int], runs: list[tuple[Card, Arrays, torch.Tensor]]) -> Contest:
    place = {query: row for row, query in enumerate(index)}
    shown: dict[int, dict[str, Any]] = {}
    failures: list[dict[int, str]] = []
    pictures: dict[str, str] = {}
    for _, arrays, _ in runs:
        own = {}
        fields = (arrays[f"failures.{name}"].tolist() for name in ("query", "captions", "right", "wrong"))
        for query, caption, right, wrong in zip(*fields, strict=True):
            own[query] = wrong
            ranks = [float(ranks[place[query]]) for _, _, ranks in runs]
            shown.setdefault(query, {"caption": caption, "right": right, "ranks": ranks})
        failures.append(own)
        for name, strip in zip(arrays["failures.names"].tolist(), arrays["failures.strips"], strict=True):
            if name not in pictures:
                pictures[name] = picture_of(strip, name).source
    return Contest(
        str((runs[0][0].results or {}).get("dataset", runs[0][0].run["dataset"])),
        [{"key": card.key, "words": card.words} for card, _, _ in runs],
        [[int((ranks < others).sum()) for _, _, others in runs] for _, _, ranks in runs],
        len(index),
        shown,
        failures,
        pictures,
    )


def as_json(contest: Contest) -> Markup:
    """Return a contest for the page's script; nothing in it can end the element that it stands in."""
    return Markup(json.dumps(contest.__dict__, ensure_ascii=False).replace("<", "\\u003c"))
