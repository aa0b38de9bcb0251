"""The equations of GARE, in the paper's order (Xiao, 2025).

t_i (N, D) are sentences, T_i (N, W, D) words, V_j (M, F, D) frames, and v_j (M, D) their mean. Vectors of all pairs are
`Pairwise`: `+`, `-`, `layer_norm`, `linear`, and `mix` define the vector of every pair without computing it.
"""

import math
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.methods.checks import check_sizes
from tvr_lightning.methods.gare.increments import Increments
from tvr_lightning.methods.gare.options import (
    Bottleneck,
    DirectionRegularization,
    GapIncrement,
    GAREOptions,
    LogMeanExp,
    NoIncrement,
    NormRegularization,
    Side,
    TextIncrement,
    TextPooling,
    Variance,
)
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.pairwise import Pairwise, PlainFrames

P = TypeVar("P", bound=Pairwise)


class GAREHead(PairHead):
    """Cosines (N, M) of corrected texts and pooled videos (Eq. 4). psi may attend to the words."""

    def __init__(self, dimension: int, words: int, frames: int, options: GAREOptions) -> None:
        increment = options.increment
        super().__init__(
            dimension,
            basis=frames + words * increment.words,
            dropout=increment.dropout,
            behind_dropout=4,
            side="text" if increment.words else "video",
        )
        self.options = options
        self.frames = frames
        self.psi = None if isinstance(increment, NoIncrement) else IncrementNetwork(dimension, increment.dropout)
        self.magnitude = nn.Linear(frames, 1) if isinstance(increment, TextIncrement) else None

    @override
    def score(self, text: TextFeatures, video: VideoFeatures, increments: bool = False) -> Scores:
        # s_ij = cos(t_i + Delta_ij, v_j), or cos(t_i, v_j + Delta_ij) (Eq. 4). With `increments`, these (n, m, D) are
        # the part `increment`.
        texts, means = self.of_texts(text.sentence, len(video)), self.of_videos(self.mean_frames(video), len(text))
        videos = self.pooled(texts, means, video)
        if self.psi is None:
            return Scores(texts.cosine(videos)[..., 0].T)
        increment = self.increments(texts, means, text, video)
        if self.options.increment.corrected == "text":
            texts = texts + increment
        else:
            videos = videos + increment
        parts = {"increment": increment.materialize().squeeze(2)} if increments else {}
        return Scores(texts.cosine(videos)[..., 0].T, parts)

    def mean_frames(self, video: VideoFeatures) -> Tensor:
        """Return v_j (M, D), the mean of the frames."""
        return masked_mean(video.frames, self.counted(video))

    def pooled(self, texts: P, means: P, video: VideoFeatures) -> P:
        """Return v_j (section 2.1), or the frames weighted by softmax_f(t_i . V_jf / temperature).

        As released, padded frames lose their weight after the softmax, and the other weights are not rescaled.
        https://github.com/musicman217/GARE-text-video-retrieval/blob/e42b0e2/tvr/models/modeling.py#L184-L206
        """
        pooling = self.options.pooling
        if not isinstance(pooling, TextPooling):
            return means
        logits = texts.dot_frames(video.frames) / pooling.temperature  # (M, F, N, 1)
        logits = logits.masked_fill(~self.counted(video)[..., None, None], torch.finfo(logits.dtype).min)
        return type(texts).mix(logits.softmax(1) * video.frame_mask[..., None, None], video.frames)

    def counted(self, video: VideoFeatures) -> Tensor:
        """Return a mask (M, F) of the frames in the mean and the softmax: all, as released, or the valid ones."""
        mask = video.frame_mask.bool()
        return mask if self.options.mask_frames else torch.ones_like(mask)

    def increments(self, texts: Pairwise, means: Pairwise, text: TextFeatures, video: VideoFeatures) -> Pairwise:
        """Return Delta_ij = psi(eta (v_j - t_i), C) (Eq. 7), or without gap R unit(v_j - psi(t_i, V_j)) (Table 5)."""
        options = self.options.increment
        assert self.psi is not None  # required by all callers
        assert isinstance(options, GapIncrement | TextIncrement)
        if isinstance(options, TextIncrement):
            direction = means - self.psi(texts, video.frames)
            # The length R (M, N, 1) = exp(linear(cosines of the text with the frames)).
            assert self.magnitude is not None
            check_sizes(text, video, text.words.shape[1], self.frames)
            cosines = torch.einsum("nd,mfd->mnf", unit(text.sentence), unit(video.frames)) * video.frame_mask[:, None]
            weight, bias = self.magnitude.weight.to(cosines.dtype), self.magnitude.bias.to(cosines.dtype)
            return direction.unit().scale(F.linear(cosines, weight, bias).exp())
        gap = means - texts if options.sign == 1 else texts - means
        if options.words:
            return self.psi(gap, text.words, text.word_mask, "text")
        return self.psi(gap, video.frames)

    def geometry(self, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
        """Return the values of Figures 3 and 8 for every pair, by name, (N, M) each, for an increment of texts.

        Angles of the increment are in radians; `text_to_video` and `corrected_to_video` are Euclidean distances.
        """
        text, video = text.float(), video.float()
        texts, means = self.of_texts(text.sentence, len(video)), self.of_videos(self.mean_frames(video), len(text))
        increment = self.increments(texts, means, text, video)
        gap = means - texts
        corrected = texts + increment
        found = {
            "angle_to_gap": increment.cosine(gap).clamp(-1, 1).acos(),
            "angle_to_text": increment.cosine(texts).clamp(-1, 1).acos(),
            "increment_norm": increment.norm(),
            "text_norm": texts.norm(),
            "corrected_norm": corrected.norm(),
            "text_to_video": gap.norm(),
            "corrected_to_video": (corrected - means).norm(),
        }
        return {name: value.squeeze(-1).T for name, value in found.items()}


class IncrementNetwork(nn.Module):
    """psi(query, C), one layer of cross-attention over the frames or the words of a pair (Eq. 7; psi_module.py).

    With q = LN1(query) and C' = LN1(C), the same LN1: o = W_O sum_k softmax_k(W_Q q . W_K C'_k / sqrt(D)) W_V C'_k,
    h = LN2(o), psi = W_M LN3(h + dropout(W_1 h)). Not built are `log_std_proj` of the released module, whose output is
    unused, and `linear2` and `mlp`, which are never called. One head, as released:
    https://github.com/musicman217/GARE-text-video-retrieval/blob/e42b0e2/tvr/models/psi_module.py#L134
    """

    def __init__(self, dimension: int, dropout: float = 0.3) -> None:
        super().__init__()
        self.dropout = dropout
        self.layer_norm1 = nn.LayerNorm(dimension)
        self.layer_norm2 = nn.LayerNorm(dimension)
        self.layer_norm3 = nn.LayerNorm(dimension)
        self.q_proj = nn.Linear(dimension, dimension)
        self.k_proj = nn.Linear(dimension, dimension)
        self.v_proj = nn.Linear(dimension, dimension)
        self.out_proj = nn.Linear(dimension, dimension)
        self.linear1 = nn.Linear(dimension, dimension)
        self.mean_proj = nn.Linear(dimension, dimension)
        # The released model's `init_weights` overwrites the identity initialization of psi_module.py.
        # https://github.com/musicman217/GARE-text-video-retrieval/blob/e42b0e2/tvr/models/modeling.py#L389-L404
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.linear1, self.mean_proj):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, query: Pairwise, context: Tensor, mask: Tensor | None = None, side: Side = "video") -> Pairwise:
        """Return the increment of every pair, in the form of `query` and with one slot.

        `context` are the frames (M, F, D) of each video, or the words (N, W, D) of each text, with a mask of the valid
        ones; an item without any attends uniformly.
        """
        # https://github.com/musicman217/GARE-text-video-retrieval/blob/e42b0e2/tvr/models/psi_module.py#L92-L93
        context = PlainFrames(context).layer_norm(self.layer_norm1).frames
        logits = query.layer_norm(self.layer_norm1).logits(context, self.q_proj, self.k_proj, side)  # (M, F or W, N, 1)
        if mask is not None:
            real = mask.bool()[:, :, None, None] if side == "video" else mask.bool().T[None, :, :, None]
            logits = logits.masked_fill(~real, torch.finfo(logits.dtype).min)
        weights = (logits / math.sqrt(context.shape[-1])).softmax(1)
        # W_O is applied to the values: attention adds up to one, so that the bias can be added before the sum.
        values = PlainFrames(context).linear(self.v_proj, self.out_proj).frames
        hidden = type(query).mix(weights, values, side).layer_norm(self.layer_norm2)
        branch = hidden.linear(self.linear1).dropout(self.dropout if self.training else 0.0)
        return (hidden + branch).layer_norm(self.layer_norm3).linear(self.mean_proj)


def norm_variance(increment: Tensor | Increments, options: NormRegularization) -> Tensor:
    """Return -E_i Var_j |Delta_ij| (Eq. 10) of increments (N, M, D), or its smooth form (appendix C.3), without weight.

    A `Variance` below minus its floor is 0 without gradient, as released:
    https://github.com/musicman217/GARE-text-video-retrieval/blob/e42b0e2/tvr/models/modeling.py#L208-L259
    """
    length = Increments.of(increment).lengths
    if isinstance(options, Variance):
        value = -length.var(1).mean()
        return torch.where(value >= -options.floor, value, 0.0)
    spread = (length - length.mean(1, keepdim=True)).square()
    return (1 + (-spread).exp().mean(1)).log().mean()


def directional_diversity(increment: Tensor | Increments, options: DirectionRegularization) -> Tensor:
    """Return E_i log E_jk exp(-alpha (1 - z_ij . z_ik)) (Eq. 11), or E_i E_jk (z_ij . z_ik)^2 (appendix C.2).

    Increments are (N, M, D). `LogMeanExp` also compares each direction with itself, as released.
    """
    cosine = Increments.of(increment).cosines  # (N, M, M)
    if isinstance(options, LogMeanExp):
        agreement = (options.alpha * cosine - options.alpha).exp().mean((1, 2))
        return (agreement + 1e-8).log().mean()
    others = ~torch.eye(cosine.shape[1], dtype=torch.bool, device=cosine.device)
    return (cosine.square() * others).mean((1, 2)).mean()


def relaxed_bottleneck(increment: Tensor | Increments, options: Bottleneck) -> Tensor:
    """Return E_j KL(N(mu_j, sigma_j^2) || N(0, prior^2)) of increments (N, M, D), without weight (Eq. 15).

    Variances are unbiased, and 1e-6 is added to the deviations, as released:
    https://github.com/musicman217/GARE-text-video-retrieval/blob/e42b0e2/tvr/models/modeling.py#L208-L259
    """
    if options.normalize and isinstance(increment, Tensor):
        increment = unit(increment)
    found = Increments.of(increment, options.axis)
    ratio = (found.deviation + 1e-6) / options.prior
    divergence = 0.5 * (ratio.square() + (found.mean / options.prior).square() - 1) - ratio.log()
    return (divergence.sum(-1) if options.reduction == "sum" else divergence.mean(-1)).mean()
