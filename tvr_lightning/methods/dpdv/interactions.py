"""How the tokens of a text meet those of a video: mean pooling, UCoFiA's aggregation, weighted-max (Table 5).

An interaction prepares each side by itself, and then scores pairs; a score depends on the tokens of its own pair only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tvr_lightning.layers.aggregation import ISA, BidirectionalAggregation
from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.methods.dpdv.weighted_max import (
    PIECES,
    Tokens,
    TokenWeights,
    compacted,
    masked_softmax,
    weighted_max,
    weighted_sum,
)


class Interaction(nn.Module, ABC):
    """Scores (N, M) of all pairs from the tokens of both sides."""

    def text(self, tokens: Tensor, mask: Tensor) -> Tokens:
        """Prepare un-normalised tokens (N, T, D) of texts, with their mask (N, T)."""
        return Tokens(unit(tokens), tokens.new_zeros(mask.shape), mask.bool())

    def video(self, tokens: Tensor, mask: Tensor) -> Tokens:
        """Prepare un-normalised tokens (M, T, D) of videos, with their mask (M, T)."""
        return self.text(tokens, mask)

    def pair_numbers(self, text_tokens: int, video_tokens: int) -> int:
        """Return how many numbers a pair takes while it is scored: its cosines, their maxima, its masks."""
        return 3 * text_tokens * video_tokens + 2 * (text_tokens + video_tokens)

    @abstractmethod
    def forward(self, text: Tokens, video: Tokens, pair_mask: Tensor | None = None) -> Tensor:
        """Return scores (N, M).

        Args:
            text: of N texts, best from long to short.
            video: of M videos.
            pair_mask: (N, M, T) bool, which of the video's tokens each pair has, where pairs differ.
        """


class MeanPooling(Interaction):
    """Cosine (N, M) of the mean tokens of both sides (Eq. 1): no parameters."""

    def text(self, tokens: Tensor, mask: Tensor) -> Tokens:
        """Keep tokens (N, T, D) as they are: their means are un-normalised."""
        return Tokens(tokens, tokens.new_zeros(mask.shape), mask.bool())

    def forward(self, text: Tokens, video: Tokens, pair_mask: Tensor | None = None) -> Tensor:
        """Return cosines (N, M); 0 for a pair of which one side has no token."""
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

    Its matrices have a row for every token, so that the number of tokens is fixed. Scores are (N, M).

    Args:
        text_slots: tokens of a text; with 1 there is one direction.
        video_slots: tokens of a video.
        temperature: factor inside the softmaxes (UCoFiA's released code: 100).
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
        """Return how many numbers a pair takes: both directions hold a softmax of their own."""
        return 3 * super().pair_numbers(text_tokens, video_tokens)

    def forward(self, text: Tokens, video: Tokens, pair_mask: Tensor | None = None) -> Tensor:
        """Return scores (N, M); 0 for a pair of which one side has no token.

        Raises:
            ValueError: another number of tokens than the matrices have rows.
        """
        found = (text.vectors.shape[1], video.vectors.shape[1])
        if found != self.slots:
            raise ValueError(
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
    """Weighted-max: scores (N, M) of texts and videos (Eqs. 5, 6 and 9).

    Args:
        dimension: D.
        text_weights: learn the weights of a text's tokens; a single sentence has the weight 1.
        simplified: Eq. 6 for single sentences, which leaves out the best frame of Eq. 5.
    """

    def __init__(self, dimension: int, text_weights: bool = True, simplified: bool = False) -> None:
        super().__init__()
        self.text_weights = TokenWeights(dimension) if text_weights else None
        self.video_weights = TokenWeights(dimension)
        self.simplified = simplified

    def text(self, tokens: Tensor, mask: Tensor) -> Tokens:
        """Return unit tokens (N, T, D) with the logits (N, T) of their weights, from a mask (N, T) of real ones."""
        if self.text_weights is None:
            return super().text(tokens, mask)
        found: Tokens = self.text_weights(tokens, mask)
        return found

    def video(self, tokens: Tensor, mask: Tensor) -> Tokens:
        """Return unit tokens (N, T, D) with the logits (N, T) of their weights, from a mask (N, T) of real ones."""
        found: Tokens = self.video_weights(tokens, mask)
        return found

    def pair_numbers(self, text_tokens: int, video_tokens: int) -> int:
        """Return how many numbers a pair takes; without gradients those of one piece of the texts live at a time."""
        numbers = super().pair_numbers(text_tokens, video_tokens)
        return numbers if torch.is_grad_enabled() else -(-numbers // PIECES)

    def forward(self, text: Tokens, video: Tokens, pair_mask: Tensor | None = None) -> Tensor:
        """Return scores (N, M) between cosines; 0 for a pair of which one side has no token."""
        if pair_mask is None:
            video = compacted(video)
        if self.simplified and text.vectors.shape[1] == 1:
            return weighted_sum(text.vectors[:, 0], video, pair_mask)
        return weighted_max(text, video, pair_mask)
