"""What a run retrieves where it fails: the queries that `contests` sets two runs against each other on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tvr_lightning.evaluation.ranks import text_to_video_ranks
from tvr_lightning.reproduce.report.figures.drawing import Arrays, Chart
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit
from tvr_lightning.reproduce.report.figures.kind import FigureKind

MOST_FAILURES = 24
STRIP_FRAMES = 2


def measure_failures(encoded: EncodedSplit) -> Arrays:
    """Return pictures of what is found in place of the right video, for queries whose video is not the first.

    Queries are drawn in one order, the same for every run on a dataset, so that runs share them where both fail. The
    wrong video is the best of the scores before post-processing.

    Returns:
        `query` (K,) int64 places in the split, `captions`, `right` and `wrong` (K,) as text, `names` (V,) of the videos
        among them, each once, `strips` (V, F, S, S, 3) uint8.
    """
    matching = encoded.matching
    rank = encoded.ranks if encoded.ranks is not None else text_to_video_ranks(encoded.similarity, matching).expected()
    others = encoded.similarity.clone()
    others[torch.arange(len(matching)), matching] = -torch.inf
    best = others.argmax(dim=1)
    drawn = np.random.default_rng(0).permutation(len(rank))
    failed = [int(query) for query in drawn if rank[query] > 1 and others.shape[1] > 1][:MOST_FAILURES]
    rows = sorted({int(row) for query in failed for row in (matching[query], best[query])})
    name = {row: encoded.split.videos[int(encoded.video_index[row])].video_id for row in rows}
    strips = [encoded.strip(row, frames=STRIP_FRAMES) for row in rows]
    return {
        "query": encoded.text_index[failed].numpy(),
        "captions": np.array([encoded.caption(query) for query in failed], dtype=str),
        "right": np.array([name[int(matching[query])] for query in failed], dtype=str),
        "wrong": np.array([name[int(best[query])] for query in failed], dtype=str),
        "names": np.array([name[row] for row in rows], dtype=str),
        "strips": np.stack(strips) if strips else np.zeros((0, STRIP_FRAMES, 1, 1, 3), np.uint8),
    }


def _nothing(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Alone they are no figure: a run's failures are shown against another run."""
    yield from ()


FIGURES = (FigureKind("failures", "Failures", measure_failures, _nothing),)
