"""Queries whose rank changes most with normalization, and the retrieval mass of their videos (NCL, Fig. 6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tvr_lightning.evaluation.balance import matching_share, retrieval_mass
from tvr_lightning.evaluation.ranks import text_to_video_ranks
from tvr_lightning.evaluation.sources import MatrixSource
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.reproduce.report.drawing import Arrays, Chart, frames
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit, normalized_scores

EXAMPLES = 4
SHOWN = ("its own video", "first before normalization", "first after normalization")


def applies(module: Any) -> bool:
    """Return whether a method ranks videos with a normalization."""
    return isinstance(module, RetrievalModule) and module.evaluation_config.normalization is not None


@torch.no_grad()
def measure_mass(encoded: EncodedSplit) -> dict[str, Any]:
    """Return the Q queries whose own video moves furthest, with the videos of `SHOWN`.

    `rank` (2, Q) of the own video before and after, `mass` (2, Q, 3) relative to a video's share, `names` (Q, 3), and
    `strips` (Q, 3, F, S, S, 3).
    """
    scores = encoded.similarity.double(), normalized_scores(encoded)["text-to-video"]
    rank = torch.stack([text_to_video_ranks(each, encoded.matching).expected() for each in scores])
    queries = torch.argsort((rank[0] - rank[1]).abs(), descending=True, stable=True)[:EXAMPLES]
    shown = torch.stack([encoded.matching[queries], *(each[queries].argmax(1) for each in scores)], dim=1)
    temperature = encoded.module.score_temperature()
    share = matching_share(encoded.matching, torch.arange(len(encoded.videos)))
    mass = torch.stack([retrieval_mass(MatrixSource(each), temperature) / share for each in scores])
    return {
        "captions": [encoded.caption(query) for query in queries],
        "rank": rank[:, queries],
        "mass": mass[:, shown],
        "names": [[encoded.name(video) for video in row] for row in shown],
        "strips": np.stack([[encoded.strip(video) for video in row] for row in shown.tolist()]),
    }


def draw_mass(arrays: Arrays) -> Iterator[Chart]:
    """Return one chart per query with frames of its videos and their mass."""
    note = (
        "NCL, Fig. 6, with the scores of one run before and after its normalization, for the queries whose rank "
        "changes most. Mass is the sum of a video's retrieval probabilities over all queries, relative to its share."
    )
    for query, caption in enumerate(arrays["captions"]):
        images = []
        for place, label in enumerate(SHOWN):
            name, (before, after) = arrays["names"][query, place], arrays["mass"][:, query, place]
            words = f"{label}: {name}, mass {before:.3g}, normalized {after:.3g}"
            own = bool(name == arrays["names"][query, 0])
            images.append(frames(arrays["strips"][query, place], f"Frames of {name}, {label}", words, own))
        before, after = arrays["rank"][:, query]
        fact = f"rank of its own video: {before:g}, normalized {after:g}"
        yield Chart(f"Retrieval mass: “{caption}”", images, [fact], note if query == 0 else "")
