"""Figures of any method: scores of matching and other pairs (DPDV, Fig. S1; GAID, Fig. 6), and a retrieval sheet."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tvr_lightning.evaluation.ranks import text_to_video_ranks
from tvr_lightning.reproduce.report.figures.drawing import (
    NEGATIVE,
    POSITIVE,
    Arrays,
    Chart,
    Scalar,
    new_figure,
    picture_of,
    to_chart,
)
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit
from tvr_lightning.reproduce.report.render import render

BINS = 60
SHEET_QUERIES, SHEET_VIDEOS = 4, 3


def measure_similarity(encoded: EncodedSplit) -> Arrays:
    """Return histograms and means of the scores of matching pairs and of all others.

    Returns:
        `edges` (BINS + 1,), `positive` and `negative` (BINS,) shares that add up to 1, and the scalars
        `positive_mean`, `negative_mean` and `overlap`, the chance in percent that another pair outscores a matching
        one, ties counted half.
    """
    scores = encoded.similarity
    own = torch.zeros_like(scores, dtype=torch.bool)
    own[torch.arange(len(scores)), encoded.matching] = True
    positive, negative = scores[own].double(), scores[~own].double()
    edges = np.linspace(float(scores.min()), float(scores.max()) + 1e-6, BINS + 1)
    above = np.sort(negative.numpy())
    lower = np.searchsorted(above, positive.numpy(), side="left")
    upper = np.searchsorted(above, positive.numpy(), side="right")
    return {
        "edges": edges,
        "positive": np.histogram(positive.numpy(), edges)[0] / len(positive),
        "negative": np.histogram(negative.numpy(), edges)[0] / len(negative),
        "positive_mean": np.array(float(positive.mean())),
        "negative_mean": np.array(float(negative.mean())),
        "overlap": 100 * (1 - (lower + upper).mean() / (2 * max(len(above), 1))),
    }


def draw_similarity(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw both histograms over one axis."""
    figures, (axis,) = new_figure(1)
    for name, colour in (("positive", POSITIVE), ("negative", NEGATIVE)):
        label = "matching pairs" if name == "positive" else "all other pairs"
        axis.stairs(arrays[name], arrays["edges"], fill=True, alpha=0.45, color=colour, label=label)
        axis.stairs(arrays[name], arrays["edges"], color=colour)
    axis.set_xlabel("score before post-processing")
    axis.set_ylabel("share of the pairs")
    axis.legend()
    yield to_chart(
        figures,
        f"{key}-similarity",
        "Scores of matching and of other pairs",
        "Two histograms of scores: of texts with their own videos, and of texts with other videos.",
        [
            Scalar("mean of matching pairs", "similarity.positive_mean"),
            Scalar("mean of other pairs", "similarity.negative_mean"),
            Scalar("chance that another pair outscores a matching one", "similarity.overlap", " %"),
        ],
        "DPDV, Fig. S1, and GAID, Fig. 6, show them of a baseline too: see between runs.",
    )


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
        "Retrieval sheet",
        "Queries with the frames of their best three videos.",
        html=render("sheet.html", key=key, queries=queries),
        note="The query's own video is framed green; queries run from the best found to the worst (TC-MGC, Figs. 9 "
        f"and 14). Ranks are the card's; tied videos share theirs. {_before(str(arrays['post_processing']))}",
    )


def _before(post_processing: str) -> str:
    if not post_processing:
        return "The run's scores are not post-processed."
    return (
        f"The three best and their scores are those before post-processing; the ranks went through {post_processing}."
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
