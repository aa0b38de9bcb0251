"""Comparisons of two runs query by query: where one ranks the right video higher, and what the other one found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tvr_lightning.reproduce.report.drawing import Arrays, frames
from tvr_lightning.reproduce.report.sources import ReportedRun, read_ranks


def comparisons(
    all_runs: Sequence[ReportedRun], arrays: Mapping[str, Arrays], save: Callable[[str, bytes], None]
) -> Iterator[dict[str, Any]]:
    """Yield the data for each group of at least two runs that ranked the same queries; frames are saved by name.

    `better[i][j]` counts the queries for which run i ranks the right video higher than run j; `failures` has for each
    run and drawn query the video that it found instead of the right one.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[ReportedRun]] = {}
    for run in all_runs:
        if "failures.query" in arrays.get(run.key, {}):
            ranks, _ = read_ranks(run, "text_to_video")
            groups.setdefault((run.data, tuple(ranks.index.tolist())), []).append(run)
    compared = [(index, runs) for (_, index), runs in groups.items() if len(runs) > 1]
    for number, (index, runs) in enumerate(compared):
        ranks_of = [read_ranks(run, "text_to_video")[0].expected() for run in runs]
        shown: dict[int, dict[str, Any]] = {}
        failures: list[dict[int, str]] = []
        videos: dict[str, str] = {}
        for run in runs:
            names = ("query", "captions", "right", "wrong", "names")
            query, captions, right, wrong, found = (arrays[run.key][f"failures.{name}"].tolist() for name in names)
            failures.append(dict(zip(query, wrong, strict=True)))
            for one, caption, video in zip(query, captions, right, strict=True):
                expected = [float(own[index.index(one)]) for own in ranks_of]
                shown[one] = {"caption": caption, "right": video, "ranks": expected}
            for name, strip in zip(found, arrays[run.key]["failures.strips"], strict=True):
                path = videos.setdefault(name, f"queries/{number}-{len(videos)}.jpg")
                save(path, frames(strip, "").content)
        better = [[int((own < other).sum()) for other in ranks_of] for own in ranks_of]
        yield {
            "title": runs[0].dataset, "runs": [run.title for run in runs], "better": better, "queries": len(index),
            "shown": shown, "failures": failures, "videos": videos,
        }  # fmt: skip
