"""Interactions of the tokens of texts and videos: mean pooling, UCoFiA's aggregation, weighted-max (Table 5).

An interaction prepares each side separately and then scores pairs. A score depends only on the tokens of its pair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tvr_lightning.errors import UserError
from tvr_lightning.layers.aggregation import ISA, BidirectionalAggregation
from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.methods.dpdv.weighted_max import (
    PIECES,
    TokenWeights,
    WeightedTokens,
    compacted,
    masked_softmax,
    weighted_max,
    weighted_sum,
)


class Interaction(nn.Module, ABC):
    """Interaction that scores all pairs (N, M) from the tokens of both sides."""

    def text(self, tokens: Tensor, mask: Tensor) -> WeightedTokens:
        """Prepare unnormalized tokens (N, T, D) of texts with their mask (N, T)."""
        return WeightedTokens(unit(tokens), tokens.new_zeros(mask.shape), mask.bool())

    def video(self, tokens: Tensor, mask: Tensor) -> WeightedTokens:
        """Prepare unnormalized tokens (M, T, D) of videos with their mask (M, T)."""
        return self.text(tokens, mask)

    def pair_numbers(self, text_tokens: int, video_tokens: int) -> int:
        """Return the number of elements per pair during scoring: cosines, their maxima, and masks."""
        return 3 * text_tokens * video_tokens + 2 * (text_tokens + video_tokens)

    @abstractmethod
    def forward(self, text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
        """Return scores (N, M).

        Args:
            text: Tokens of N texts, preferably sorted from long to short.
            video: Tokens of M videos.
            pair_mask: Mask (N, M, T) bool of the video tokens of each pair, if pairs differ.
        """


class MeanInteraction(Interaction):
    """Cosine (N, M) of the mean tokens of both sides (Eq. 1), without parameters."""

    def text(self, tokens: Tensor, mask: Tensor) -> WeightedTokens:
        """Return tokens (N, T, D) unchanged, because means are computed from unnormalized tokens."""
        return WeightedTokens(tokens, tokens.new_zeros(mask.shape), mask.bool())

    def forward(self, text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
        """Return cosines (N, M), or 0 for pairs with a side without tokens."""
        sentence = unit((text.weights.unsqueeze(-1) * text.vectors).sum(1))
        if pair_mask is None:
            return sentence @ unit((video.weights.unsqueeze(-1) * video.vectors).sum(1)).T
        weight = masked_softmax(video.logits.expand_as(pair_mask), pair_mask & video.mask)
        product = torch.einsum("nd,mtd,nmt->nm", sentence, video.vectors, weight)
        gram = video.vectors @ video.vectors.transpose(1, 2)
        length = torch.einsum("nmt,mtu,nmu->nm", weight, gram, weight).clamp(min=COSINE_EPS**2).sqrt()
        return product / length


class SimilarityAggregation(Interaction):
    """UCoFiA's interactive similarity aggregation of the cosines, in one direction or both (Table 5).

    The matrices have one row per token, so the number of tokens is fixed. Scores are (N, M).

    Args:
        text_slots: Number of tokens of a text. 1 gives one direction.
        video_slots: Number of tokens of a video.
        temperature: Factor inside the softmaxes (UCoFiA's released code: 100).
    """

    def __init__(self, text_slots: int, video_slots: int, temperature: float = 100.0) -> None:
        super().__init__()
        self.slots = (text_slots, video_slots)
        self.aggregation: nn.Module
        if text_slots == 1:
            self.aggregation = ISA(temperature).module(video_slots)
        else:
            self.aggregation = BidirectionalAggregation(ISA(temperature), video_slots, text_slots)

    def pair_numbers(self, text_tokens: int, video_tokens: int) -> int:
        """Return the number of elements per pair, including a softmax for each direction."""
        return 3 * super().pair_numbers(text_tokens, video_tokens)

    def forward(self, text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
        """Return scores (N, M), or 0 for pairs with a side without tokens.

        Raises:
            UserError: The number of tokens differs from the number of matrix rows.
        """
        found = (text.vectors.shape[1], video.vectors.shape[1])
        if found != self.slots:
            raise UserError(
                f"UCoFiA's aggregation was built for {self.slots[0]} tokens per text and {self.slots[1]} per video, "
                f"but got {found[0]} and {found[1]}. Set model.init_args.words and frames to those of the data."
            )
        cosine = torch.einsum("nwd,mtd->twnm", text.vectors, video.vectors)
        there = video.mask.T[:, None, None, :]
        if pair_mask is not None:
            there = there & pair_mask.permute(2, 0, 1).unsqueeze(1)
        there = there & text.mask.T[None, :, :, None]
        cosine = cosine.masked_fill(~there, -torch.inf)
        score: Tensor = self.aggregation(cosine[:, 0] if self.slots[0] == 1 else cosine)
        return score.masked_fill(~there.any(0).any(0), 0.0)


class WeightedMax(Interaction):
    """Weighted-max interaction of texts and videos (Eqs. 5, 6 and 9), with scores (N, M).

    Args:
        dimension: Dimension D of the tokens.
        text_weights: Whether to learn weights of text tokens. A single sentence has the weight 1.
        simplified: Whether to use Eq. 6 for single sentences, which leaves out the best frame of Eq. 5.
    """

    def __init__(self, dimension: int, text_weights: bool = True, simplified: bool = False) -> None:
        super().__init__()
        self.text_weights = TokenWeights(dimension) if text_weights else None
        self.video_weights = TokenWeights(dimension)
        self.simplified = simplified

    def text(self, tokens: Tensor, mask: Tensor) -> WeightedTokens:
        """Return unit tokens (N, T, D) of texts with the logits (N, T) of their weights, for a mask (N, T)."""
        if self.text_weights is None:
            return super().text(tokens, mask)
        found: WeightedTokens = self.text_weights(tokens, mask)
        return found

    def video(self, tokens: Tensor, mask: Tensor) -> WeightedTokens:
        """Return unit tokens (M, T, D) of videos with the logits (M, T) of their weights, for a mask (M, T)."""
        found: WeightedTokens = self.video_weights(tokens, mask)
        return found

    def pair_numbers(self, text_tokens: int, video_tokens: int) -> int:
        """Return the number of elements per pair. Without gradients, one piece of the texts is in memory at a time."""
        numbers = super().pair_numbers(text_tokens, video_tokens)
        return numbers if torch.is_grad_enabled() else -(-numbers // PIECES)

    def forward(self, text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
        """Return scores (N, M) in the range of a cosine, or 0 for pairs with a side without tokens."""
        if pair_mask is None:
            video = compacted(video)
        if self.simplified and text.vectors.shape[1] == 1:
            return weighted_sum(text.vectors[:, 0], video, pair_mask)
        return weighted_max(text, video, pair_mask)
