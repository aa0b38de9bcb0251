"""Comparisons of two runs query by query: where one ranks the right video higher, and what the other one found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvr_lightning.reproduce.report.drawing import Arrays, Image, frames
from tvr_lightning.reproduce.report.sources import ReportedRun, read_ranks


def comparisons(
    runs: Sequence[ReportedRun], arrays: Mapping[str, Arrays]
) -> list[tuple[dict[str, Any], dict[str, Image]]]:
    """Return the data for each group of at least two runs that ranked the same queries, and the frames of its videos.

    `better[i][j]` counts the queries for which run i ranks the right video higher than run j; `failures` has for each
    run and drawn query the video that it found instead of the right one.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[ReportedRun]] = {}
    for run in runs:
        if "failures.query" in arrays.get(run.key, {}):
            ranks, _ = read_ranks(run, "text_to_video")
            groups.setdefault((run.data, tuple(ranks.index.tolist())), []).append(run)
    return [_compared(list(index), own, arrays) for (_, index), own in groups.items() if len(own) > 1]


def _compared(
    index: list[int], runs: list[ReportedRun], arrays: Mapping[str, Arrays]
) -> tuple[dict[str, Any], dict[str, Image]]:
    place = {query: row for row, query in enumerate(index)}
    ranks = [read_ranks(run, "text_to_video")[0].expected() for run in runs]
    shown: dict[int, dict[str, Any]] = {}
    failures, videos = [], {}
    for run in runs:
        own = {name: arrays[run.key][f"failures.{name}"] for name in ("query", "captions", "right", "wrong", "names")}
        query, captions, right, wrong, names = (values.tolist() for values in own.values())
        failures.append(dict(zip(query, wrong, strict=True)))
        for one, caption, video in zip(query, captions, right, strict=True):
            shown[one] = {"caption": caption, "right": video, "ranks": [float(own[place[one]]) for own in ranks]}
        for name, strip in zip(names, arrays[run.key]["failures.strips"], strict=True):
            videos[name] = frames(strip, f"Frames of {name}")
    better = [[int((own < other).sum()) for other in ranks] for own in ranks]
    titles = {"title": runs[0].dataset, "runs": [run.title for run in runs]}
    return {**titles, "better": better, "queries": len(index), "shown": shown, "failures": failures}, videos
