"""Test of whether a score normalization uses the set of test queries, by removing some of them."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from tvr_lightning.audit.experiments import Features
from tvr_lightning.evaluation.normalization import Context, Direction, Normalizer
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.sources import AdjustedSource, ScoreSource, TransposedSource
from tvr_lightning.features import Scores

MOVED = 1e-3
"""Largest change of a normalized score that counts as noise, in median absolute deviations of all normalized scores."""


def normalizer_movement(
    normalizer: Normalizer,
    score: Callable[..., Scores],
    features: Features,
    video_of_text: Tensor,
    own_text: Tensor | None,
    temperature: float,
    generator: torch.Generator,
) -> dict[Direction, float]:
    """Return the largest change of a normalized score per direction when a random half of the queries is removed.

    If the normalizer needs a bank, all texts and videos are the bank, regardless of the queries.

    Args:
        normalizer: Normalizer to test, copied for every fit.
        score: Scoring function of the method or of its released protocol.
        features: Features of N texts and M videos.
        video_of_text: Index of the video that each text describes, (N,) int64.
        own_text: Index of the text that a released protocol gives each video, (M,) int64; None without such a protocol.
        temperature: Temperature gamma of the method.
        generator: Random generator for the choice of the queries.
    """
    (texts, videos), n, m = features, len(features[0]), len(features[1])
    captions = torch.bincount(video_of_text, minlength=m)

    def source(rows: Tensor, columns: Tensor) -> ScoreSource:
        own = [] if own_text is None else [texts[own_text[columns]]]
        return PairScores(score, texts[rows], videos[columns], memory_budget_bytes=2**30, own_texts=own)

    def normalized(direction: Direction, queries: Tensor) -> Tensor:
        """Return the normalized scores (Q, G) of Q queries for the whole gallery, float64 on the CPU."""
        bank = source(torch.arange(n), torch.arange(m))
        if direction == "text-to-video":
            scores = source(queries, torch.arange(m))
            counts = torch.ones(len(queries)), torch.bincount(video_of_text[queries], minlength=m)
        else:
            scores, bank = TransposedSource(source(torch.arange(n), queries)), TransposedSource(bank)
            counts = captions[queries], torch.ones(n)
        query_counts, gallery_counts = (count.double().to(scores.device) for count in counts)
        fitted = copy.deepcopy(normalizer)
        given = bank if fitted.needs_bank else None
        parts = [bank] if fitted.needs_parts else []  # any part is enough for what the audit measures
        adjust = fitted.fit(scores, Context(direction, given, query_counts, gallery_counts, temperature, parts))
        found = torch.empty(scores.queries, scores.gallery, dtype=torch.float64)
        for block in AdjustedSource(scores, adjust).blocks():
            found[block.rows, block.columns] = block.values.double().cpu()
        return found

    def movement(direction: Direction, queries: int) -> float:
        whole = normalized(direction, torch.arange(queries))
        spread = float((whole - whole.median()).abs().median()) or float(whole.std()) or 1.0
        halves = [half.sort().values for half in torch.randperm(queries, generator=generator).tensor_split(2)]
        return max(float((normalized(direction, half) - whole[half]).abs().max()) / spread for half in halves)

    return {"text-to-video": movement("text-to-video", n), "video-to-text": movement("video-to-text", m)}
