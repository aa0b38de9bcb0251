"""Metrics of ranks, rows of the released code, and score matrices in blocks."""

import json

import torch

from tvr_lightning.evaluation.balance import balance
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.sources import MatrixSource
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.metrics import direction_metrics


def summarize(ranks, recall=(1, 5, 10)):
    """Metrics of one direction by name."""
    return {metric.name: metric.value(ranks).item() for metric in direction_metrics(recall)}


def text_features(sentence):
    """Features of texts of one word."""
    return TextFeatures(sentence, sentence[:, None], torch.ones(len(sentence), 1, dtype=torch.bool))


def video_features(frame):
    """Features of videos of one frame."""
    return VideoFeatures(frame[:, None], torch.ones(len(frame), 1, dtype=torch.bool))


def normalization_error(similarity, temperature):
    """Normalization error of the gallery of a square matrix whose diagonal matches."""
    own = torch.arange(len(similarity))
    return balance(MatrixSource(similarity), temperature, own, own).error


def released_row(cases, name):
    """A row that the authors' code computed, under this project's names."""
    row = json.loads((cases / "metrics.json").read_text())[name]
    return {"R@1": row["R1"], "R@5": row["R5"], "R@10": row["R10"], "MdR": row["MedianR"], "MnR": row["MeanR"]}


def in_blocks(matrix, rows=5, columns=3):
    """A score matrix in blocks, as an evaluation with a memory budget."""
    texts, videos = text_features(matrix), video_features(torch.eye(matrix.shape[1], dtype=matrix.dtype))

    def score(text, video):
        return Scores(text.sentence @ video.frames[:, 0].T)

    return PairScores(score, texts, videos, block_texts=rows, block_videos=columns)
