"""Figure of any method: a retrieval sheet, the best videos of some queries (TC-MGC, Figs. 9 and 14)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tvr_lightning.evaluation.ranks import text_to_video_ranks
from tvr_lightning.reproduce.report.figures.drawing import (
    Arrays,
    Chart,
    picture_of,
)
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit
from tvr_lightning.reproduce.report.figures.kind import FigureKind
from tvr_lightning.reproduce.report.render import render

SHEET_QUERIES, SHEET_VIDEOS = 4, 3


def measure_sheet(encoded: EncodedSplit) -> Arrays:
    """Return pictures of the best videos of some queries, and of each query's own video.

    Queries are spread evenly from the best found to the worst by the ranks of the run's card, so that the sheet shows
    failures as they come. The best videos are those of the scores before post-processing.

    Returns:
        `captions` and `names` as text, `score` and `correct` (Q, 1 + K), `rank` (Q,) expected rank of the own video
        from 1, `strips` (Q, 1 + K, F, S, S, 3) uint8: the own video first, then the K best; `post_processing`, what
        the ranks went through, empty for nothing.
    """
    scores, matching = encoded.similarity, encoded.matching
    rank = encoded.ranks if encoded.ranks is not None else text_to_video_ranks(scores, matching).expected()
    order = torch.argsort(rank, stable=True)
    places = np.linspace(0, len(order) - 1, min(SHEET_QUERIES, len(order))).round().astype(int)
    queries = order[torch.as_tensor(places)]
    best = scores[queries].topk(min(SHEET_VIDEOS, scores.shape[1])).indices
    shown = torch.cat([matching[queries].unsqueeze(1), best], dim=1)
    strips = {video: encoded.strip(video) for video in sorted(set(shown.flatten().tolist()))}
    ids = [encoded.split.videos[int(place)].video_id for place in encoded.video_index]
    return {
        "captions": np.array([encoded.caption(int(query)) for query in queries]),
        "names": np.array([[ids[int(video)] for video in row] for row in shown]),
        "score": np.take_along_axis(scores[queries].numpy(), shown.numpy(), axis=1),
        "correct": (shown == matching[queries].unsqueeze(1)).numpy(),
        "rank": rank[queries].double().numpy(),
        "post_processing": np.array(encoded.post_processing or ""),
        "strips": np.stack([np.stack([strips[int(video)] for video in row]) for row in shown]),
    }


def draw_sheet(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Lay out each query with its best videos as strips of frames, its own video framed green."""
    queries = []
    for query, caption in enumerate(arrays["captions"]):
        clips = [_clip(arrays, query, place, f"{place}.") for place in range(1, arrays["names"].shape[1])]
        if not arrays["correct"][query, 1:].any():
            clips.append(_clip(arrays, query, 0, "its own:"))
        queries.append({"caption": caption, "rank": arrays["rank"][query], "clips": clips})
    yield Chart(
        "Queries with the frames of their best three videos.",
        html=render("sheet.html", key=key, queries=queries),
        note="The query's own video has a green frame; queries are ordered from the best to the worst rank (TC-MGC, "
        f"Figs. 9 and 14). Ranks are those of the run card; tied videos share a rank. "
        f"{_before(str(arrays['post_processing']))}",
    )


def _before(post_processing: str) -> str:
    if not post_processing:
        return "The run's scores are not post-processed."
    return (
        f"The three best videos and their scores are those before post-processing; ranks are those after "
        f"{post_processing}."
    )


def _clip(arrays: Arrays, query: int, place: int, label: str) -> dict[str, object]:
    own, name = bool(arrays["correct"][query, place]), str(arrays["names"][query, place])
    whose = "the query's own video" if own else "another video"
    return {
        "label": label,
        "name": name,
        "own": own,
        "place": place,
        "score": arrays["score"][query, place],
        "frames": picture_of(arrays["strips"][query, place], f"Frames of {name}, {whose}"),
    }


FIGURES = (FigureKind("sheet", "Retrieval sheet", measure_sheet, draw_sheet),)
