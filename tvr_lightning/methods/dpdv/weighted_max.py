"""Weighted-max: a weighted sum of the best match of every token among the tokens of the other side.

DPDV's interaction (Eqs. 5, 6, 9; Supplement Eqs. 2 and 3), after DRL's weighted token-wise interaction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tvr_lightning.features import FeatureBatch
from tvr_lightning.layers.cosine import unit

PIECES = 4
"""Number of groups of similar length that the texts of a block are split into, to reduce the padding of short texts."""


@dataclass
class WeightedTokens(FeatureBatch):
    """Prepared tokens of N texts or videos.

    Attributes:
        vectors: Unit vectors (N, T, D).
        logits: Logits (N, T) of the weights.
        mask: Mask (N, T) bool, True for valid tokens.
    """

    vectors: Tensor
    logits: Tensor
    mask: Tensor

    @property
    def weights(self) -> Tensor:
        """Weights theta (N, T) that add up to 1 over the valid tokens, and are 0 elsewhere."""
        return masked_softmax(self.logits, self.mask)


class TokenWeights(nn.Module):
    """Logits of the token weights: Linear(D, 2D), ReLU, Linear(2D, 1) (Eq. 6; sizes of HBI's modeling.py).

    Args:
        dimension: Dimension D of the tokens.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dimension, 2 * dimension), nn.ReLU(), nn.Linear(2 * dimension, 1))

    def forward(self, tokens: Tensor, mask: Tensor) -> WeightedTokens:
        """Return unit tokens with logits for unnormalized tokens (N, T, D) and their mask (N, T)."""
        return WeightedTokens(unit(tokens), self.layers(tokens).squeeze(-1), mask.bool())


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax of logits (..., T) over the mask (..., T), with 0 for masked and for empty items."""
    least = torch.finfo(logits.dtype).min
    return logits.masked_fill(~mask, least).softmax(-1).masked_fill(~mask, 0.0)


def compacted(tokens: WeightedTokens, most: int | None = None) -> WeightedTokens:
    """Return the valid tokens in order, padded to `most`; by default the largest number, with a device sync."""
    most = max(int(tokens.mask.sum(1).max()), 1) if most is None else most
    if most == tokens.mask.shape[1]:
        return tokens
    first = (~tokens.mask).to(torch.uint8).sort(dim=1, stable=True).indices[:, :most]
    vectors = tokens.vectors.gather(1, first.unsqueeze(-1).expand(-1, -1, tokens.vectors.shape[-1]))
    return WeightedTokens(vectors, tokens.logits.gather(1, first), tokens.mask.gather(1, first))


def by_length(text: WeightedTokens) -> Tensor:
    """Return the order (N,) int64 of texts from the longest to the shortest. Ties keep their order."""
    return text.mask.sum(1).sort(descending=True, stable=True).indices


def weighted_max(text: WeightedTokens, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
    """Return 1/2 (sum_w theta_w max_t a_wt + sum_t theta_t max_w a_wt) of all pairs, for cosines a (Eqs. 5 and 9).

    Args:
        text: Tokens of N texts, preferably sorted from long to short (`by_length`), because groups are trimmed to
            their longest text.
        video: Tokens of M videos.
        pair_mask: Mask (N, M, T) bool of the video tokens of each pair, if pairs differ.

    Returns:
        Scores (N, M), or 0 for pairs with a side without tokens.
    """
    if pair_mask is not None:
        pair_mask = pair_mask & video.mask
    # One device synchronization for the lengths of the texts and for whether a video token is absent.
    present = (video.mask if pair_mask is None else pair_mask).all()
    *lengths, complete = torch.cat([text.mask.sum(1), present.reshape(1)]).tolist()
    size = -(-len(text) // PIECES)
    rows = []
    for start in range(0, len(text), size):
        places = slice(start, start + size)
        longest = max(1, *lengths[places])
        padded = min(lengths[places]) < longest, not complete
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
        video_mask, weight = video.mask[None, None], video.weights
    else:
        video_mask, weight = pair_mask.unsqueeze(1), masked_softmax(video.logits.expand_as(pair_mask), pair_mask)
    # An absent token has the weight 0 and must not be the maximum of another token.
    for mask, some_absent in zip((text.mask[:, :, None, None], video_mask), padded, strict=True):
        if some_absent:
            cosine = _without(~mask, cosine)
    best_word, best_token = cosine.amax(1), cosine.amax(3)  # (N, M, T), (N, W, M)
    score = (text.weights.unsqueeze(-1) * best_token).sum(1) + (weight * best_word).sum(-1)
    has_words = text.mask.any(1).unsqueeze(1)
    has_tokens = video.mask.any(1).unsqueeze(0) if pair_mask is None else pair_mask.any(2)
    return (score / 2).masked_fill(~(has_words & has_tokens), 0.0)


def _without(absent: Tensor, cosine: Tensor) -> Tensor:
    """Return cosines with -2 for `absent` tokens, below any cosine but finite. In place without gradients."""
    return cosine.masked_fill(absent, -2.0) if torch.is_grad_enabled() else cosine.masked_fill_(absent, -2.0)


def weighted_sum(text: Tensor, video: WeightedTokens, pair_mask: Tensor | None = None) -> Tensor:
    """Return sum_f theta_f a_f (N, M) of unit sentences (N, D) and frames (Eq. 6); 0 for pairs without frames.

    The sum over frames is computed once per video. Only frames selected by a mask (N, M, F) need their own cosines.
    """
    if pair_mask is None:
        return text @ (video.weights.unsqueeze(-1) * video.vectors).sum(1).T
    pair_mask = pair_mask & video.mask
    weight = masked_softmax(video.logits.expand_as(pair_mask), pair_mask)
    return (weight * torch.einsum("nd,mfd->nmf", text, video.vectors)).sum(-1)
