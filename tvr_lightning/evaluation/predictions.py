"""Predictions: the best videos of every text, as a table for other tools."""

from pathlib import Path

from torch import Tensor

from tvr_lightning.data.records import Split
from tvr_lightning.evaluation.normalization import Context, Normalizer
from tvr_lightning.evaluation.sources import AdjustedSource, ScoreSource, best_of_gallery
from tvr_lightning.files import write_whole


def best_videos(
    scores: ScoreSource, k: int, normalizer: Normalizer | None = None, context: Context | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k best scores of every text, descending (N, k), and the columns of their videos (N, k)."""
    if normalizer is not None:
        scores = AdjustedSource(scores, normalizer.fit(scores, context or Context()))
    values, columns = best_of_gallery(scores, k)
    return values.float(), columns


def write_predictions(path: Path, split: Split, text_index: Tensor, scores: Tensor, video_index: Tensor) -> None:
    """Write a Parquet file with one row per text and place, the correct video and its place (empty if not found).

    Texts (N,) and videos (N, k) are given by their indices in the split, with descending scores (N, k).
    """
    import pandas as pd

    n, k = scores.shape
    video_ids = [video.video_id for video in split.videos]
    index_of_row = text_index.repeat_interleave(k).tolist()
    texts = [split.texts[index] for index in index_of_row]
    frame = pd.DataFrame(
        {
            "text_index": index_of_row,
            "text": [text.text for text in texts],
            "place": list(range(1, k + 1)) * n,
            "video_id": [video_ids[index] for index in video_index.flatten().tolist()],
            "score": scores.flatten().tolist(),
            "correct_video_id": [video_ids[text.video] for text in texts],
        }
    )
    correct = frame[frame["video_id"] == frame["correct_video_id"]].set_index("text_index")["place"]
    frame["correct_place"] = frame["text_index"].map(correct).astype("Int64")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, frame.to_parquet(index=False))
