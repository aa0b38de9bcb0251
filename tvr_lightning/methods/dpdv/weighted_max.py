"""Weighted-max: every token of one side meets its best match of the other, weighed by what the token is worth.

DPDV's interaction (Eqs. 5, 6, 9; Supplement Eqs. 2 and 3), after DRL's weighted token-wise interaction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tvr_lightning.features import Record
from tvr_lightning.layers.cosine import unit

PIECES = 4
"""Into how many groups of similar length the texts of a block are split, so that short ones are not padded to long."""


@dataclass
class Tokens(Record):
    """Tokens of N texts or videos, ready to meet others.

    Attributes:
        vectors: (N, T, D), at unit length.
        logits: (N, T) before the softmax that gives their weights.
        mask: (N, T) bool, True where there is a token.
    """

    vectors: Tensor
    logits: Tensor
    mask: Tensor

    @property
    def weights(self) -> Tensor:
        """(N, T) weights theta that add up to 1 over the tokens that are there; 0 elsewhere."""
        return masked_softmax(self.logits, self.mask)


class TokenWeights(nn.Module):
    """Logit of each token's weight: Linear(D, 2D), ReLU, Linear(2D, 1) (Eq. 6; sizes of HBI's modeling.py).

    Args:
        dimension: D.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dimension, 2 * dimension), nn.ReLU(), nn.Linear(2 * dimension, 1))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tokens:
        """Return tokens with unit vectors and logits, for un-normalised tokens (N, T, D) and their mask (N, T)."""
        return Tokens(unit(tokens), self.layers(tokens).squeeze(-1), mask.bool())


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax of logits (..., T) over the places where the mask (..., T) is True; 0 elsewhere, and where none is."""
    least = torch.finfo(logits.dtype).min
    return logits.masked_fill(~mask, least).softmax(-1).masked_fill(~mask, 0.0)


def compacted(tokens: Tokens, most: int | None = None) -> Tokens:
    """Return the tokens that are there, in their order, padded to the largest number any item has: (N, T', ...).

    Half of the frames are in each of DPDV's paths, and captions are shorter than their places: what is not there
    should cost nothing.

    Args:
        tokens: of N items.
        most: the largest number, at least 1; None counts it, which waits for the device.
    """
    most = max(int(tokens.mask.sum(1).max()), 1) if most is None else most
    if most == tokens.mask.shape[1]:
        return tokens
    first = (~tokens.mask).to(torch.uint8).sort(dim=1, stable=True).indices[:, :most]
    vectors = tokens.vectors.gather(1, first.unsqueeze(-1).expand(-1, -1, tokens.vectors.shape[-1]))
    return Tokens(vectors, tokens.logits.gather(1, first), tokens.mask.gather(1, first))


def by_length(text: Tokens) -> Tensor:
    """Return the order (N,) int64 of texts from the longest to the shortest; equals keep their order."""
    return text.mask.sum(1).sort(descending=True, stable=True).indices


def weighted_max(text: Tokens, video: Tokens, pair_mask: Tensor | None = None) -> Tensor:
    """1/2 (sum_w theta_w max_t a_wt + sum_t theta_t max_w a_wt) of all pairs, a being cosines (Eqs. 5 and 9).

    Args:
        text: tokens of N texts, best from long to short (`by_length`): groups are trimmed to their longest.
        video: tokens of M videos.
        pair_mask: (N, M, T) bool, which of the video's tokens each pair has, where pairs differ.

    Returns:
        (N, M); 0 for a pair of which one side has no token.
    """
    if pair_mask is not None:
        pair_mask = pair_mask & video.mask
    # How long texts are, and whether a token of a video is absent, in one question to the device.
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


def _weighted_max(text: Tokens, video: Tokens, pair_mask: Tensor | None, padded: tuple[bool, bool]) -> Tensor:
    """Return (N, M); `padded` says whether a token of a text, and of a video, is absent."""
    texts, words, dimension = text.vectors.shape
    videos, tokens, _ = video.vectors.shape
    cosine = text.vectors.reshape(-1, dimension) @ video.vectors.reshape(-1, dimension).T
    cosine = cosine.view(texts, words, videos, tokens)
    if pair_mask is None:
        video_mask, weight = video.mask[None, None], video.weights
    else:
        video_mask, weight = pair_mask.unsqueeze(1), masked_softmax(video.logits.expand_as(pair_mask), pair_mask)
    # A token that is not there has the weight 0, whatever its own maximum, and is never that of another one.
    for mask, some_absent in zip((text.mask[:, :, None, None], video_mask), padded, strict=True):
        if some_absent:
            cosine = _without(~mask, cosine)
    best_word, best_token = cosine.amax(1), cosine.amax(3)  # (N, M, T), (N, W, M)
    score = (text.weights.unsqueeze(-1) * best_token).sum(1) + (weight * best_word).sum(-1)
    has_words = text.mask.any(1).unsqueeze(1)
    has_tokens = video.mask.any(1).unsqueeze(0) if pair_mask is None else pair_mask.any(2)
    return (score / 2).masked_fill(~(has_words & has_tokens), 0.0)


def _without(absent: Tensor, cosine: Tensor) -> Tensor:
    """Return cosines, which are lost without gradients, with -2 where a token is `absent`: below any, but finite."""
    return cosine.masked_fill(absent, -2.0) if torch.is_grad_enabled() else cosine.masked_fill_(absent, -2.0)


def weighted_sum(text: Tensor, video: Tokens, pair_mask: Tensor | None = None) -> Tensor:
    """sum_f theta_f a_f of all pairs: one sentence against the frames (Eq. 6).

    The sum over frames moves to the video, which costs one inner product per pair; only frames that pairs choose for
    themselves need their cosines one by one.

    Args:
        text: (N, D) sentences, at unit length.
        video: frames of M videos.
        pair_mask: (N, M, F) bool, which frames each pair has, where pairs differ.

    Returns:
        (N, M); 0 for a pair without frames.
    """
    if pair_mask is None:
        return text @ (video.weights.unsqueeze(-1) * video.vectors).sum(1).T
    pair_mask = pair_mask & video.mask
    weight = masked_softmax(video.logits.expand_as(pair_mask), pair_mask)
    return (weight * torch.einsum("nd,mfd->nmf", text, video.vectors)).sum(-1)
