"""Comparisons of two runs query by query: where one ranks the right video higher, and what the other one found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvr_lightning.reproduce.report.drawing import Arrays, Image, frames
from tvr_lightning.reproduce.report.sources import Run, read_ranks


@dataclass
class Comparisons:
    """The runs that ranked the same queries of a dataset.

    Attributes:
        title: Dataset.
        runs: Their titles.
        better: `better[i][j]`, number of queries for which run i ranks the right video higher than run j.
        queries: Number of queries.
        shown: Position of a query to its `caption`, the `right` video, and the `ranks` of the runs.
        failures: For each run, position of a query to the video that it found instead of the right one.
        videos: Frames of each video.
    """

    title: str
    runs: list[str]
    better: list[list[int]]
    queries: int
    shown: dict[int, dict[str, Any]]
    failures: list[dict[int, str]]
    videos: dict[str, Image]


def comparisons(runs: Sequence[Run], arrays: Mapping[str, Arrays]) -> list[Comparisons]:
    """Return the comparisons for each group of at least two runs that ranked the same queries.

    Args:
        runs: All runs.
        arrays: Arrays of the figures by key of the run.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[Run]] = {}
    for run in runs:
        if "failures.query" in arrays.get(run.key, {}):
            ranks, _ = read_ranks(run, "text_to_video")
            groups.setdefault((run.data, tuple(ranks.index.tolist())), []).append(run)
    return [_compared(list(index), own, arrays) for (_, index), own in groups.items() if len(own) > 1]


def _compared(index: list[int], runs: list[Run], arrays: Mapping[str, Arrays]) -> Comparisons:
    place = {query: row for row, query in enumerate(index)}
    ranks = [read_ranks(run, "text_to_video")[0].expected() for run in runs]
    better = [[int((own < other).sum()) for other in ranks] for own in ranks]
    found = Comparisons(runs[0].dataset, [run.title for run in runs], better, len(index), {}, [], {})
    for run in runs:
        own = {name: arrays[run.key][f"failures.{name}"] for name in ("query", "captions", "right", "wrong", "names")}
        queries = own["query"].tolist()
        found.failures.append(dict(zip(queries, own["wrong"].tolist(), strict=True)))
        for query, caption, right in zip(queries, own["captions"].tolist(), own["right"].tolist(), strict=True):
            if query in place:
                of_runs = [float(one[place[query]]) for one in ranks]
                found.shown.setdefault(query, {"caption": caption, "right": right, "ranks": of_runs})
        for name, strip in zip(own["names"].tolist(), arrays[run.key]["failures.strips"], strict=True):
            if name not in found.videos:
                found.videos[name] = frames(strip, f"Frames of {name}")
    return found
