"""Ranks of queries as counts of gallery items that score higher than a match and that score the same.

Counts add up over blocks and processes. With ties the rank is random, and its expectation and the probability of being
among the first K follow from both counts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch


@dataclass
class Ranks(FeatureBatch):
    """Ranks of the E matches of Q queries, which nearly always have one match each.

    Its methods return one value per query, in ascending order of `index`. The rank of a query is that of its first
    match, with ties broken at random.

    Attributes:
        better: (E,) int64, number of gallery items that score strictly higher than the match.
        tied: (E,) int64, number of gallery items that score the same as the match, including the match (at least 1).
        index: (E,) int64, identity of each query, such as the index of the text or video in its split.
    """

    better: Tensor
    tied: Tensor
    index: Tensor

    def _first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return counts (Q,) float64 of items before the first match, items tied with it, and matches among these."""
        queries, query = self.index.unique(return_inverse=True)
        better = torch.full_like(queries, torch.iinfo(torch.int64).max)
        better.scatter_reduce_(0, query, self.better, "amin")
        best = self.better == better[query]
        tied = torch.empty_like(queries).scatter_(0, query[best], self.tied[best])
        matches = torch.zeros_like(queries).index_add_(0, query, best.long())
        return better.double(), tied.double(), matches.double()

    def expected(self) -> Tensor:
        """Return the expected ranks (Q,) float64, from 1."""
        better, tied, matches = self._first()
        return better + (tied + 1.0) / (matches + 1.0)

    def found_within(self, k: int) -> Tensor:
        """Return the probabilities (Q,) float64 that a match is among the first `k`."""
        better, tied, matches = self._first()
        within = (k - better).clamp(min=0.0).minimum(tied)
        found = within / tied
        missed = 1.0 - found
        for i in range(1, int(matches.max()) if len(matches) else 0):  # drawn without replacement
            more = torch.where(matches > i, (within / (tied - i)).clamp(max=1.0), 0.0)
            found += missed * more
            missed *= 1.0 - more
        return found

    def reciprocal(self) -> Tensor:
        """Return the expectations (Q,) float64 of 1 / rank."""
        better, tied, matches = self._first()
        found = (torch.digamma(better + tied + 1.0) - torch.digamma(better + 1.0)) / tied
        for query in (matches > 1).nonzero().flatten().tolist():
            items = int(tied[query])
            right = int(matches[query])
            place = torch.arange(1, items - right + 2, dtype=torch.float64, device=found.device)
            chance = right / (items - place + 1.0)  # of a match at this place if there was none before
            first = chance * torch.cat([chance.new_ones(1), (1.0 - chance).cumprod(0)[:-1]])
            found[query] = (first / (better[query] + place)).sum()
        return found

    def normalized_gain(self, k: int) -> Tensor:
        """Return the expected nDCG (Q,) float64: gains 1 / log2(1 + rank) of matches up to rank `k`, over the most."""
        gains = 1.0 / torch.arange(1, k + 1, dtype=torch.float64, device=self.better.device).add(1.0).log2()
        total = torch.cat([gains.new_zeros(1), gains.cumsum(0)])  # of the first 0 to k ranks
        last = (self.better + self.tied).clamp(max=k)
        gain = (total[last] - total[self.better.clamp(max=k)]) / self.tied.double()
        queries, query, matches = self.index.unique(return_inverse=True, return_counts=True)
        found = torch.zeros_like(queries, dtype=torch.float64).index_add_(0, query, gain)
        return found / total[matches.clamp(max=k)]


def count_ranks(scores: Tensor, match: Tensor) -> Ranks:
    """Rank the matches of Q queries in scores (Q, G): the index of each query's match (Q,), or a boolean (Q, G).

    A query without a match has no rank.
    """
    if match.dtype == torch.bool:
        scores = scores.contiguous()
        query = match.nonzero()[:, 0]
        ordered = scores.sort(dim=1).values
        last = torch.searchsorted(ordered, scores, right=True)[match]
        tied = last - torch.searchsorted(ordered, scores)[match]
        better = scores.shape[1] - last
    else:
        query = torch.arange(len(match), device=match.device)
        own = scores.gather(1, match[:, None])
        better = (scores > own).sum(dim=1)
        tied = (scores == own).sum(dim=1)
    return Ranks(better, tied, query)


def text_to_video_ranks(similarity: Tensor, match: Tensor) -> Ranks:
    """Rank each text's video in scores (N, M), as `count_ranks` does. Raise UserError if a score is NaN."""
    raise_on_nan(similarity)
    return count_ranks(similarity, match)


def video_to_text_ranks(similarity: Tensor, match: Tensor) -> Ranks:
    """Rank each video's captions in scores (N, M), with a video represented by its best caption.

    `match` (N,) is each text's video. The multi-caption protocol of CLIP4Clip (`tensor_video_to_text_sim` in its
    metrics.py): ranks count videos, not captions. Videos without a caption are neither queries nor competitors. With a
    boolean `match` (N, M), ranks count captions. Raises UserError if a score is NaN.
    """
    raise_on_nan(similarity)
    if match.dtype == torch.bool:
        return count_ranks(similarity.T, match.T)
    videos, group = torch.unique(match, return_inverse=True)
    best = similarity.new_full((len(videos), len(videos)), float("-inf"))
    best.scatter_reduce_(0, group[:, None].expand(-1, len(videos)), similarity[:, videos], reduce="amax")
    ranks = count_ranks(best.T, torch.arange(len(videos), device=similarity.device))
    return Ranks(ranks.better, ranks.tied, videos)


def raise_on_nan(scores: Tensor) -> None:
    """Raise UserError if scores (N, M) are NaN, which would rank best, since comparisons with NaN are false."""
    nan = torch.isnan(scores)
    if nan.any():
        first = nan.nonzero()[0].tolist()
        raise UserError(
            f"{int(nan.sum())} of {nan.numel()} scores are NaN, in {int(nan.any(dim=1).sum())} rows and "
            f"{int(nan.any(dim=0).sum())} columns; the first is text {first[0]} against video {first[1]}. "
            "Look for an overflow or an empty mask in the method's score"
        )
