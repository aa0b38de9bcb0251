"""Test of whether a score normalization uses the set of test queries, by removing some of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from tvr_lightning.evaluation.normalization import Context, Direction, Normalizer
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.sources import ScoreSource, TransposedSource
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures

MOVED = 1e-3
"""Largest change of a normalized score that counts as noise, in median absolute deviations of all normalized scores."""


class NormalizerTrial:
    """A normalizer with texts and videos, applied to the scores of all queries or of some of them.

    If the normalizer needs a bank, all texts and videos are the bank, regardless of the queries.

    Args:
        normalizer: Normalizer to test, copied for every fit.
        score: Scoring function of the method or of its released protocol.
        texts: Features of N texts.
        videos: Features of M videos.
        video_of_text: Index of the video that each text describes, (N,) int64.
        own_text: Index of the text that a released protocol gives each video, (M,) int64; None without such a protocol.
        temperature: Temperature gamma of the method.
    """

    def __init__(
        self,
        normalizer: Normalizer,
        score: Callable[..., Scores],
        texts: TextFeatures,
        videos: VideoFeatures,
        video_of_text: Tensor,
        own_text: Tensor | None,
        temperature: float,
    ) -> None:
        self.normalizer, self.score, self.temperature = normalizer, score, temperature
        self.texts, self.videos, self.video_of_text, self.own_text = texts, videos, video_of_text, own_text

    def movement(self, generator: torch.Generator) -> dict[Direction, float]:
        """Return the largest change of a score per direction when a random half of the queries is removed."""
        return {
            "text-to-video": self._movement("text-to-video", len(self.texts), generator),
            "video-to-text": self._movement("video-to-text", len(self.videos), generator),
        }

    def _movement(self, direction: Direction, queries: int, generator: torch.Generator) -> float:
        everything = torch.arange(queries)
        whole = self._normalized(direction, everything)
        spread = float((whole - whole.median()).abs().median()) or float(whole.std()) or 1.0
        order = torch.randperm(queries, generator=generator)
        halves = [half.sort().values for half in order.tensor_split(2)]
        return max(float((self._normalized(direction, half) - whole[half]).abs().max()) / spread for half in halves)

    def _normalized(self, direction: Direction, queries: Tensor) -> Tensor:
        """Return the normalized scores (Q, G) of Q queries for the whole gallery, float64 on the CPU."""
        n, m = len(self.texts), len(self.videos)
        source: ScoreSource
        bank: ScoreSource = self._source(torch.arange(n), torch.arange(m))
        counts = torch.bincount
        if direction == "text-to-video":
            source = self._source(queries, torch.arange(m))
            context = (torch.ones(len(queries)), counts(self.video_of_text[queries], minlength=m))
        else:
            source, bank = TransposedSource(self._source(torch.arange(n), queries)), TransposedSource(bank)
            context = (counts(self.video_of_text, minlength=m)[queries], torch.ones(n))
        query_counts, gallery_counts = (part.double().to(source.device) for part in context)
        given = bank if self.normalizer.needs_bank else None
        fitted = copy.deepcopy(self.normalizer)
        parts = [bank] if fitted.needs_parts else []  # any part is enough for what the audit measures
        adjust = fitted.fit(source, Context(direction, given, query_counts, gallery_counts, self.temperature, parts))
        found = torch.empty(source.queries, source.gallery, dtype=torch.float64)
        for block in source.blocks():
            found[block.rows, block.columns] = adjust(block.values, block.rows, block.columns).double().cpu()
        return found

    def _source(self, texts: Tensor, videos: Tensor) -> PairScores:
        own = [] if self.own_text is None else [self.texts[self.own_text[videos]]]
        return PairScores(
            self.score,
            self.texts[texts],
            self.videos[videos],
            memory_budget_bytes=2**30,
            own_texts=own,
        )
