"""Interactions of the tokens of texts and videos: mean pooling, UCoFiA's aggregation, weighted-max (DPDV, Table 5).

An interaction prepares each side separately and then scores pairs. A score depends only on the tokens of its pair.
Weighted-max is DPDV's own (Eqs. 5, 6, 9; Supplement, Eqs. 2 and 3), after DRL's weighted token-wise interaction.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch
from tvr_lightning.layers.aggregation import ISA, BidirectionalAggregation
from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.pairwise.tiles import loops_are_fast

PIECES = 4
"""Number of groups of similar length that the texts of a block are split into, to reduce the padding of short texts."""


@dataclass
class WeightedTokens(FeatureBatch):
    """Prepared tokens of N texts or videos, with logits of their weights."""

    vectors: Tensor  # (N, T, D)
    logits: Tensor  # (N, T)
    mask: Tensor  # (N, T) bool

    @property
    def weights(self) -> Tensor:
        """Weights theta (N, T) that add up to 1 over the valid tokens, and are 0 elsewhere."""
        return masked_softmax(self.logits, self.mask)

    @property
    def mean(self) -> Tensor:
        """Weighted mean (N, D) of the tokens."""
        return (self.weights.unsqueeze(-1) * self.vectors).sum(1)


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax of logits (..., T) over the mask (..., T), with 0 for masked and for empty items."""
    least = torch.finfo(logits.dtype).min
    return logits.masked_fill(~mask, least).softmax(-1).masked_fill(~mask, 0.0)


class TokenWeights(nn.Module):
    """Logits of the token weights: Linear(D, 2D), ReLU, Linear(2D, 1) (Eq. 6; sizes of HBI's modeling.py)."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dimension, 2 * dimension), nn.ReLU(), nn.Linear(2 * dimension, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (N, T) for unnormalized tokens (N, T, D)."""
        return self.layers(tokens).squeeze(-1)


class Interaction(nn.Module, ABC):
    """Interaction that scores all pairs (N, M) from the tokens of both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.text_weights: TokenWeights | None = None
        self.video_weights: TokenWeights | None = None

    def prepared(self, side: Literal["text", "video"], tokens: Tensor, mask: Tensor) -> WeightedTokens:
        """Prepare unnormalized tokens (N, T, D) of texts or videos with their mask (N, T)."""
        weights = self.text_weights if side == "text" else self.video_weights
        logits = tokens.new_zeros(mask.shape) if weights is None else weights(tokens)
        return WeightedTokens(unit(tokens), logits, mask.bool())

    def pair_numbers(self, text_tokens: int, video_tokens: int) -> int:
        """Return the number of elements per pair during scoring: cosines, their maxima, and masks."""
        return 3 * text_tokens * video_tokens + 2 * (text_tokens + video_tokens)

    @abstractmethod
    def forward(self, text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
        """Return scores (N, M), or 0 for pairs with a side without tokens.

        Texts are preferably sorted from long to short. `pair_mask` (N, M, T) bool are the video tokens of each pair, if
        pairs differ.
        """


class MeanInteraction(Interaction):
    """Cosine (N, M) of the mean tokens of both sides (Eq. 1), without parameters."""

    @override
    def prepared(self, side: Literal["text", "video"], tokens: Tensor, mask: Tensor) -> WeightedTokens:
        # Means are computed from unnormalized tokens.
        return WeightedTokens(tokens, tokens.new_zeros(mask.shape), mask.bool())

    @override
    def forward(self, text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
        sentence = unit(text.mean)
        if pair_mask is None:
            return sentence @ unit(video.mean).T
        weight = masked_softmax(video.logits.expand_as(pair_mask), pair_mask & video.mask)
        product = torch.einsum("nd,mtd,nmt->nm", sentence, video.vectors, weight)
        gram = video.vectors @ video.vectors.transpose(1, 2)
        length = torch.einsum("nmt,mtu,nmu->nm", weight, gram, weight).clamp(min=COSINE_EPS**2).sqrt()
        return product / length


class SimilarityAggregation(Interaction):
    """UCoFiA's interactive similarity aggregation of the cosines, in one direction or both (Table 5).

    The matrices have one row per token, so the numbers of tokens are fixed. One token of a text gives one direction.
    """

    def __init__(self, text_slots: int, video_slots: int, temperature: float = 100.0) -> None:
        super().__init__()
        self.slots = (text_slots, video_slots)
        self.aggregation: nn.Module
        if text_slots == 1:
            self.aggregation = ISA(temperature).module(video_slots)
        else:
            self.aggregation = BidirectionalAggregation(ISA(temperature), video_slots, text_slots)

    @override
    def pair_numbers(self, text_tokens: int, video_tokens: int) -> int:
        return 3 * super().pair_numbers(text_tokens, video_tokens)  # a softmax for each direction

    @override
    def forward(self, text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
        found = (text.vectors.shape[1], video.vectors.shape[1])
        if found != self.slots:
            raise UserError(
                f"UCoFiA's aggregation was built for {self.slots[0]} tokens per text and {self.slots[1]} per video, "
                f"but got {found[0]} and {found[1]}. Set model.init_args.words and frames to those of the data."
            )
        cosine = torch.einsum("nwd,mtd->twnm", text.vectors, video.vectors)
        there = video.mask.T[:, None, None, :] & text.mask.T[None, :, :, None]
        if pair_mask is not None:
            there = there & pair_mask.permute(2, 0, 1).unsqueeze(1)
        cosine = cosine.masked_fill(~there, -torch.inf)
        score: Tensor = self.aggregation(cosine[:, 0] if self.slots[0] == 1 else cosine)
        return score.masked_fill(~there.any(0).any(0), 0.0)


class WeightedMax(Interaction):
    """Weighted-max interaction of texts and videos (Eqs. 5, 6 and 9).

    Args:
        dimension: Dimension D of the tokens.
        text_weights: Whether to learn weights of text tokens. A single sentence has the weight 1.
        simplified: Whether to use Eq. 6 for single sentences, which leaves out the best frame of Eq. 5.
    """

    def __init__(self, dimension: int, text_weights: bool = True, simplified: bool = False) -> None:
        super().__init__()
        if text_weights:
            self.text_weights = TokenWeights(dimension)
        self.video_weights = TokenWeights(dimension)
        self.simplified = simplified

    @override
    def pair_numbers(self, text_tokens: int, video_tokens: int) -> int:
        numbers = super().pair_numbers(text_tokens, video_tokens)
        # Without gradients, one piece of the texts is in memory at a time.
        return numbers if torch.is_grad_enabled() else -(-numbers // PIECES)

    @override
    def forward(self, text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
        if pair_mask is None and loops_are_fast(video.mask.device):
            video = compacted(video, max(int(video.mask.sum(1).max()), 1))
        if self.simplified and text.vectors.shape[1] == 1:
            return weighted_sum(text.vectors[:, 0], video, pair_mask)
        return weighted_max(text, video, pair_mask)


def compacted(tokens: WeightedTokens, most: int) -> WeightedTokens:
    """Return the valid tokens in order, padded to `most`."""
    if most == tokens.mask.shape[1]:
        return tokens
    first = (~tokens.mask).to(torch.uint8).sort(dim=1, stable=True).indices[:, :most]
    vectors = tokens.vectors.gather(1, first.unsqueeze(-1).expand(-1, -1, tokens.vectors.shape[-1]))
    return WeightedTokens(vectors, tokens.logits.gather(1, first), tokens.mask.gather(1, first))


def weighted_sum(text: Tensor, video: WeightedTokens, pair_mask: Tensor | None) -> Tensor:
    """Return sum_f theta_f a_f (N, M) of unit sentences (N, D) and frames (Eq. 6); 0 for pairs without frames.

    The sum over frames is computed once per video. Only frames selected by a mask (N, M, F) need their own cosines.
    """
    if pair_mask is None:
        return text @ video.mean.T
    weight = masked_softmax(video.logits.expand_as(pair_mask), pair_mask & video.mask)
    return (weight * torch.einsum("nd,mfd->nmf", text, video.vectors)).sum(-1)


def weighted_max(text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None) -> Tensor:
    """Return 1/2 (sum_w theta_w max_t a_wt + sum_t theta_t max_w a_wt), (N, M), for cosines a (Eqs. 5 and 9).

    Groups of texts are trimmed to their longest text, so texts are preferably sorted from long to short.
    """
    if torch.compiler.is_exporting():
        return _weighted_max(text, video, pair_mask, (True, True))
    if pair_mask is not None:
        pair_mask = pair_mask & video.mask
    fast = loops_are_fast(text.mask.device)  # otherwise, reading the lengths would wait for the device
    lengths = text.mask.sum(1).tolist() if fast else []
    complete = fast and bool((video.mask if pair_mask is None else pair_mask).all())
    size = -(-len(text) // PIECES)
    rows = []
    for start in range(0, len(text), size):
        places = slice(start, start + size)
        longest = max(1, *lengths[places]) if fast else text.mask.shape[1]
        padded = not fast or min(lengths[places]) < longest, not complete
        piece = compacted(text[places], longest)
        rows.append(_weighted_max(piece, video, None if pair_mask is None else pair_mask[places], padded))
    return torch.cat(rows)


def _weighted_max(
    text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None, padded: tuple[bool, bool]
) -> Tensor:
    """Return scores (N, M). `padded`: whether any token of a text, and of a video, is absent."""
    texts, words, dimension = text.vectors.shape
    videos, tokens, _ = video.vectors.shape
    cosine = text.vectors.reshape(-1, dimension) @ video.vectors.reshape(-1, dimension).T
    cosine = cosine.view(texts, words, videos, tokens)
    if pair_mask is None:
        video_mask, weight, has_tokens = video.mask[None, None], video.weights, video.mask.any(1)
    else:
        video_mask, has_tokens = pair_mask.unsqueeze(1), pair_mask.any(2)
        weight = masked_softmax(video.logits.expand_as(pair_mask), pair_mask)
    # An absent token has the weight 0 and must not be the maximum of another token. -2 is below any cosine but finite.
    fill = Tensor.masked_fill if torch.is_grad_enabled() else Tensor.masked_fill_
    for mask, some_absent in zip((text.mask[:, :, None, None], video_mask), padded, strict=True):
        if some_absent:
            cosine = fill(cosine, ~mask, -2.0)
    best_word, best_token = cosine.amax(1), cosine.amax(3)  # (N, M, T), (N, W, M)
    score = (text.weights.unsqueeze(-1) * best_token).sum(1) + (weight * best_word).sum(-1)
    return (score / 2).masked_fill(~(text.mask.any(1).unsqueeze(1) & has_tokens), 0.0)
