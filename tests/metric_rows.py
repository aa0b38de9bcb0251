"""Metrics of ranks, rows of the released code, and score matrices in blocks."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tvr_lightning.evaluation.balance import balance
from tvr_lightning.evaluation.metrics import rank_metrics
from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.evaluation.sources import Block, MatrixSource, ScoreSource
from tvr_lightning.features import TextFeatures, VideoFeatures


def summarize(ranks: Ranks, recall: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Metrics of one direction by name."""
    return {name: value.item() for name, value in rank_metrics(recall)(ranks).items()}


def text_features(sentence: Tensor) -> TextFeatures:
    """Features of texts of one word."""
    return TextFeatures(sentence, sentence[:, None], torch.ones(len(sentence), 1, dtype=torch.bool))


def video_features(frame: Tensor) -> VideoFeatures:
    """Features of videos of one frame."""
    return VideoFeatures(frame[:, None], torch.ones(len(frame), 1, dtype=torch.bool))


def normalization_error(similarity: Tensor, temperature: float) -> float:
    """Normalization error of the gallery of a square matrix whose diagonal matches."""
    own = torch.arange(len(similarity))
    return balance(MatrixSource(similarity), temperature, own, own).error


def released_row(cases: Path, name: str) -> dict[str, float]:
    """A row that the authors' code computed, under this project's names."""
    row = json.loads((cases / "metrics.json").read_text())[name]
    return {"R@1": row["R1"], "R@5": row["R5"], "R@10": row["R10"], "MdR": row["MedianR"], "MnR": row["MeanR"]}


class BlockSource(ScoreSource):
    """A matrix in blocks of uneven size, as an evaluation that exceeds its memory budget provides it."""

    def __init__(self, matrix: Tensor, rows: int = 5, columns: int = 3) -> None:
        super().__init__(*matrix.shape, matrix.device)
        self.matrix, self.steps = matrix, (rows, columns)

    def blocks(self):
        for column in range(0, self.gallery, self.steps[1]):
            for row in range(0, self.queries, self.steps[0]):
                rows = slice(row, min(row + self.steps[0], self.queries))
                columns = slice(column, min(column + self.steps[1], self.gallery))
                yield Block(self.matrix[rows, columns], rows, columns)
