"""Score normalization at test time: dual softmax, QB-Norm, and Sinkhorn biases.

A normalizer processes one direction at a time, with queries as rows and gallery items as columns. It reads a stream of
blocks of scores and returns a function that adjusts any block, so that no complete (N, M) matrix is needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.sources import (
    AdjustedSource,
    Adjustment,
    MatrixSource,
    ScoreSource,
    TransposedSource,
    best_of_gallery,
    complete_matrix,
    gallery_logsumexp,
    query_logsumexp,
)
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.sinkhorn import sinkhorn_log_weights
from tvr_lightning.metrics import Direction
from tvr_lightning.option_types import Count, Positive, check

# Cosines have smaller exponents at the released temperatures, also in sums over many queries.
LARGEST_EXPONENT = 200.0


@dataclass
class Bank:
    """Features of K training texts and K' training videos, used instead of user queries."""

    texts: TextFeatures
    videos: VideoFeatures


@dataclass
class Context:
    """Information for a normalizer in addition to the scores of Q queries against G gallery items in one direction.

    Attributes:
        direction: direction of the retrieval.
        bank: scores (K, G) of K training queries against the G gallery items.
        bank_parts: Parts whose mean these scores are, (K, G) each; given to normalizers with `needs_parts`.
        query_counts: (Q,) float64, number of matches of each query in the other modality of the test set.
        gallery_counts: (G,) float64, the same for each gallery item.
        temperature: divisor gamma of the method's scores.
        both: False if the other direction is not needed.
        keys: True if only the order of each query's normalized scores matters. A normalizer whose scores can overflow
            or underflow then returns others in the same order, such as logarithms.
        warnings: Conditions that limit the results, added by `fit`.
    """

    direction: Direction = "text-to-video"
    bank: ScoreSource | None = None
    query_counts: Tensor | None = None
    gallery_counts: Tensor | None = None
    temperature: float | None = None
    bank_parts: Sequence[ScoreSource] = ()
    keys: bool = False
    both: bool = True
    warnings: list[str] = field(default_factory=list)


class Normalizer(ABC):
    """Post-processing of scores (Q, G) of Q queries against G gallery items.

    Attributes:
        name: name in result tables.
        transductive: True if it uses the test queries as a whole, so that results are not comparable with those of
            systems that process one query at a time.
        needs_bank: True if it needs training queries.
        accepts_bank: True if it can use training queries instead of the test queries.
        needs_parts: True if it needs the parts of their scores.
    """

    name: str
    transductive = False
    needs_bank = False
    accepts_bank = False
    needs_parts = False

    @abstractmethod
    def fit(self, scores: ScoreSource, context: Context) -> Adjustment:
        """Fit to the scores of Q queries against G gallery items, and return the adjustment of their blocks.

        The adjustment takes an (r, c) block with the slices of its rows and columns, and returns the normalized block
        in float64, since float32 adds ties. Raises UserError if something that it needs is missing in the context.
        """

    def measured(self, video_of_text: Tensor) -> dict[str, float]:
        """Return values for the tables, in percent by name; only here, the video of each text (N,) is available."""
        return {}


def normalize_scores(
    normalizer: Normalizer,
    similarity: Tensor,
    bank: Tensor | None = None,
    direction: Direction = "text-to-video",
    query_counts: Tensor | None = None,
    gallery_counts: Tensor | None = None,
    temperature: float | None = None,
) -> Tensor:
    """Normalize a complete matrix of scores (Q, G), with a bank (K, G) of scores of training queries.

    Videos are the rows for video-to-text. The other arguments are those of `Context`.

    Example:
        >>> scores = torch.tensor([[0.9, 0.5], [0.7, 0.6]])  # both texts find the first video
        >>> normalize_scores(DualSoftmax(temperature=1.0), scores)
        tensor([[0.4949, 0.2375],
                [0.3151, 0.3150]], dtype=torch.float64)
    """
    source = None if bank is None else MatrixSource(bank)
    context = Context(direction, source, query_counts, gallery_counts, temperature)
    scores = MatrixSource(similarity)
    return complete_matrix(AdjustedSource(scores, normalizer.fit(scores, context)))


class DualSoftmax(Normalizer):
    """Dual softmax, scores (Q, G) times a softmax over all test queries: s_ij softmax_i(t s_ij).

    Introduced as DSL by CAMoE (Cheng et al. 2021). With a bank, the sum of the softmax is that of the bank's queries.

    Args:
        temperature: factor t inside the softmax (GAID and T-MASS, released: 100).

    Example:
        >>> scores = torch.tensor([[0.9, 0.5], [0.7, 0.6]])  # both texts find the first video
        >>> normalize_scores(DualSoftmax(), scores).argmax(1)
        tensor([0, 1])
    """

    transductive = True
    accepts_bank = True

    def __init__(self, temperature: Positive = 100.0) -> None:
        self.temperature = temperature
        check(self)
        self.name = f"dual softmax (temperature {temperature:g})"

    @override
    def fit(self, scores: ScoreSource, context: Context) -> Adjustment:
        negative = torch.zeros((), dtype=torch.int64, device=scores.device)

        def count(values: Tensor, rows: slice, columns: slice) -> Tensor:
            negative.add_((values < 0).sum())
            return values

        total = gallery_logsumexp(AdjustedSource(context.bank or scores, count), self.temperature)
        if scores.shard.sum(negative):
            context.warnings.append("some scores are below zero, and dual softmax can reverse their order")
        context.warnings += _warn_of_logits(total, self.temperature)

        def adjust(values: Tensor, rows: slice, columns: slice) -> Tensor:
            values = values.double()
            share = values * self.temperature - total[columns]
            if context.keys:
                return values.sign() * _key(values.abs().log() + share)
            return values * share.exp()

        return adjust


class QueryBankNorm(Normalizer):
    """QB-Norm with the dynamic inverted softmax (Bogolin et al., CVPR 2022; released code).

    The adjusted score exp(beta s_ij) / sum over bank queries of exp(beta s_kj) applies to test queries whose best
    gallery item is among the best k of some bank query; the other queries keep their scores. Scores are (Q, G), bank
    scores (K, G).

    Args:
        beta: factor of the scores inside the exponentials (released: 20).
        k: number of best gallery items of each bank query that count as popular (released: 1).

    Example:
        >>> scores = torch.tensor([[0.9, 0.5], [0.7, 0.6]])  # both texts find the first video
        >>> bank = torch.tensor([[0.8, 0.6], [0.7, 0.5]])  # and so does every training text
        >>> normalize_scores(QueryBankNorm(), scores, bank).argmax(1)
        tensor([0, 1])
    """

    needs_bank = True

    def __init__(self, beta: Positive = 20.0, k: Count = 1) -> None:
        self.beta = beta
        self.k = k
        check(self)
        self.name = f"QB-Norm (beta {beta:g}, k {k})"

    @override
    def fit(self, scores: ScoreSource, context: Context) -> Adjustment:
        bank = _need_bank(context, self.name)
        chosen = torch.isin(best_of_gallery(scores, 1)[1].flatten(), best_of_gallery(bank, self.k)[1])
        total = gallery_logsumexp(bank, self.beta)
        context.warnings += _warn_of_logits(total, self.beta)

        def adjust(values: Tensor, rows: slice, columns: slice) -> Tensor:
            values = values.double()
            share = values * self.beta - total[columns]
            return torch.where(chosen[rows, None], _key(share) if context.keys else share.exp(), values)

        return adjust


class SinkhornBias(Normalizer):
    """Bias for every gallery item from Sinkhorn's algorithm: s_ij + b_j (NCL, Eqs. 10 and 11, and Table 5).

    Scores s are (Q, G), biases b (G,) float64.

    Args:
        temperature: divisor gamma of the scores; None uses the method's own (1 / exp(logit_scale); CLIP: 0.01).
        queries: `train` balances the gallery against training queries, `oracle` against the test queries themselves
            (the paper's upper bound).
        iterations: number of iterations (paper: 4).
        marginals: `uniform`, or `count` for marginals proportional to the number of test captions of a video (Sec.
            3.3). `count` uses the test set's pairing counts and is therefore also transductive.
        per_part: Separate bias for each part of a score that is a mean of parts; the mean of the biases is added
            (UCoFiA).
    """

    def __init__(
        self,
        temperature: Positive | None = None,
        queries: Literal["train", "oracle"] = "train",
        iterations: Count = 4,
        marginals: Literal["uniform", "count"] = "uniform",
        per_part: bool = False,
    ) -> None:
        if per_part and queries != "train":
            raise UserError(f"per_part needs queries: train, got {queries}")
        self.temperature = temperature
        self.queries = queries
        self.iterations = iterations
        self.marginals = marginals
        self.needs_bank = queries == "train"
        self.per_part = self.needs_parts = per_part
        check(self)
        self.transductive = queries == "oracle" or marginals == "count"
        gamma = "the method's gamma" if temperature is None else f"gamma {temperature:g}"
        self.name = f"Sinkhorn ({queries} queries, {gamma}, {iterations} iterations, {marginals} marginals"
        self.name += ", a bias per part)" if per_part else ")"

    @override
    def fit(self, scores: ScoreSource, context: Context) -> Adjustment:
        bias = self.gallery_bias(scores, context)

        def adjust(values: Tensor, rows: slice, columns: slice) -> Tensor:
            return values.double() + bias[columns]

        return adjust

    def gallery_bias(self, scores: ScoreSource, context: Context) -> Tensor:
        """Return the biases (G,) float64 of the gallery items, on the scale of the scores.

        Training queries are the rows of their matrix in both directions. The oracle uses one matrix with texts as rows
        in both directions, because after a few iterations the side that is balanced last makes a difference.
        """
        gamma = self.temperature if self.temperature is not None else context.temperature
        if gamma is None:
            raise UserError(
                f"{self.name} needs the temperature that the method divides its scores by. Set the normalization's "
                "temperature, such as 0.01 for cosines of CLIP and 1 for logits."
            )
        gallery = self._marginal(context.gallery_counts, "gallery")

        def log_weights(source: ScoreSource, rows: Tensor | float, columns: Tensor | float) -> tuple[Tensor, Tensor]:
            weights = sinkhorn_log_weights(
                lambda weights: query_logsumexp(source, 1.0 / gamma, weights),
                lambda weights: gallery_logsumexp(source, 1.0 / gamma, weights),
                self.iterations,
                rows,
                columns,
            )
            context.warnings += _warn_of_logits(weights[1], 1.0 / gamma)
            return weights

        if self.queries == "train":
            banks = context.bank_parts if self.needs_parts else [_need_bank(context, self.name)]
            if not banks:
                raise UserError(f"{self.name} needs a method whose score is a mean of parts. Set per_part to false.")
            return gamma * torch.stack([log_weights(bank, 0.0, gallery)[1] for bank in banks]).mean(0)
        queries = self._marginal(context.query_counts, "query")
        if context.direction == "text-to-video":
            weights = log_weights(scores, queries, gallery)[1]
        else:
            weights = log_weights(TransposedSource(scores), gallery, queries)[0]
        return gamma * weights

    def _marginal(self, counts: Tensor | None, side: str) -> Tensor | float:
        if self.marginals == "uniform":
            return 0.0
        if counts is None:
            raise UserError(f"{self.name} needs the number of matches of each {side} item")
        # A video without captions has no share; it is treated as if it had one caption.
        return counts.clamp(min=1.0).log()


class HalfBank(Normalizer):
    """Normalization of each half of the test queries with the scores of the other half as its bank.

    The matches of a bank's queries are in the gallery, unlike those of training queries.

    Args:
        normalizer: Normalization that uses a bank.
        video_of_text: Video of each text (N,), whose texts are in the same half.
        videos: Number of videos M.
        seed: Seed for the halves.
    """

    transductive = True

    def __init__(self, normalizer: Normalizer, video_of_text: Tensor, videos: int, seed: int = 0) -> None:
        if videos < 2:
            raise UserError(f"Halves of {videos} videos cannot be a bank. Use a test set of at least two videos.")
        self.normalizer = normalizer
        half = torch.randperm(videos, generator=torch.Generator().manual_seed(seed)) < videos // 2
        self.halves: dict[Direction, Tensor] = {"text-to-video": half[video_of_text], "video-to-text": half}
        self.name = f"{normalizer.name} with the other half of the queries as bank"

    @override
    def fit(self, scores: ScoreSource, context: Context) -> Adjustment:
        half = self.halves[context.direction]
        matrix = complete_matrix(scores)
        first, second = (
            self.normalizer.fit(scores, replace(context, bank=MatrixSource(matrix[bank]))) for bank in (~half, half)
        )

        def adjust(values: Tensor, rows: slice, columns: slice) -> Tensor:
            return torch.where(half[rows, None], first(values, rows, columns), second(values, rows, columns))

        return adjust


def _key(logarithm: Tensor) -> Tensor:
    """Return positive numbers in the order of some logarithms, with their relative precision; 1 for 0."""
    return torch.where(logarithm > 0, logarithm + 1.0, 1.0 / (1.0 - logarithm))


def _warn_of_logits(total: Tensor, scale: float) -> list[str]:
    """Return a warning if scores are not in the range of cosines, given their log sums (G,) at a scale."""
    exceeds = (total.abs() > max(LARGEST_EXPONENT, 2.0 * scale)).any()
    return ["the scores look like logits, but the temperature is for cosines"] if exceeds else []


def _need_bank(context: Context, name: str) -> ScoreSource:
    if context.bank is None:
        raise UserError(f"{name} needs the scores of training queries. Pass a bank.")
    return context.bank
