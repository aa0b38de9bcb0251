"""Predictions: the best videos of every text, as a table for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tvr_lightning.evaluation.normalization import Context, Normalizer
from tvr_lightning.evaluation.sources import AdjustedSource, ScoreSource, best_of_gallery
from tvr_lightning.files import write_whole


def best_videos(
    scores: ScoreSource, k: int, normalizer: Normalizer | None = None, context: Context | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k best scores of every text, descending (N, k), and the columns of their videos (N, k)."""
    if normalizer is not None:
        scores = AdjustedSource(scores, normalizer.fit(scores, context or Context()))
    columns = best_of_gallery(scores, k)
    values = torch.empty(columns.shape, device=scores.device)
    for block in scores.blocks():
        rows = columns[block.rows]
        here = (rows >= block.columns.start) & (rows < block.columns.stop)
        row, place = here.nonzero(as_tuple=True)
        values[block.rows][row, place] = block.values[row, rows[here] - block.columns.start].float()
    return values, columns


def write_predictions(
    path: Path, texts: Sequence[str], video_ids: Sequence[str], text_index: Tensor, scores: Tensor, video_index: Tensor
) -> None:
    """Write one row per text and rank: text_index, text, place (from 1), video_id, score.

    Args:
        path: Path of the Parquet file.
        texts, video_ids: Texts and video IDs of the split.
        text_index: Index of the text of each row of scores, (N,).
        scores: Scores in descending order, (N, k).
        video_index: Index of the video of each score, (N, k).
    """
    import pandas as pd

    n, k = scores.shape
    frame = pd.DataFrame(
        {
            "text_index": text_index.repeat_interleave(k).tolist(),
            "text": [texts[i] for i in text_index.tolist() for _ in range(k)],
            "place": list(range(1, k + 1)) * n,
            "video_id": [video_ids[j] for j in video_index.flatten().tolist()],
            "score": scores.flatten().tolist(),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, frame.to_parquet(index=False))
