"""GARE: Rebalancing Contrastive Alignment with Bottlenecked Semantic Increments in Text-Video Retrieval (Xiao, 2025).

Read beside section 2 of the paper; psi itself is `tvr_lightning.pairwise.IncrementNetwork`. Defaults are those of the
released code (musicman217/GARE-text-video-retrieval, tvr/models/modeling.py and psi_module.py).

Deviations:
- pooling: paper the video side of the cosine is the mean of the frames; released their mean by softmax(t . V / 3);
  here as released (`pooling`).
- mean of the frames in the gap: released counts padded frames; here as released (`mask_frames`).
- information bottleneck: paper 0.07 times the mean over D; released 1e-4 times the sum; here as released
  (`bottleneck`).
- norm variance below its floor: paper -lambda; released 0; here 0 (the gradient is zero either way).
- temperature: paper 0.01; released learns CLIP's, at most 100; here as released (`fixed_temperature`).
- optimiser: paper AdamW (appendix H.5); released BertAdam; here as released (`optimizer`).
- augmentation: paper mentions none; released RandAugment; here as released (`data.init_args.augmentation`).
- corrected videos, words as context, the query without gap: paper has them in Tables 4, 5 and 7; released not; here
  options, and what the paper leaves open in them.
- ties: released counts a tied query several times; here they are ranked by their expectation.
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import torch
from torch import Tensor, nn

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.temporal import temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.clip4clip import masked_mean
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.methods.gare_options import (
    BottleneckConfig,
    DirectionConfig,
    GAREConfig,
    IncrementConfig,
    NormVarianceConfig,
    PairwiseForm,
    PoolingConfig,
    Side,
)
from tvr_lightning.pairwise import DensePairVectors, IncrementNetwork, PairVectors, Pairwise, score_in_blocks
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.losses import info_nce
from tvr_lightning.training.optim import OptimizerConfig


class GAREHead(nn.Module):
    """Features of texts and videos to increments and scores of all pairs (section 2.2).

    Args:
        dimension: D.
        frames: F.
        config: switches.

    Raises:
        ValueError: switches and sizes do not fit each other.
    """

    def __init__(self, dimension: int, frames: int, config: GAREConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GAREConfig()
        self.dimension, self.frames = dimension, frames
        self.psi = IncrementNetwork(dimension, config.increment.dropout) if config.use_increment else None
        self.magnitude: nn.Linear | None = None
        if config.use_increment and config.increment.query == "text":
            self.magnitude = nn.Linear(frames, 1)

    @property
    def form(self) -> type[Pairwise]:
        """The form of pair vectors that the options and the mode (training or not) ask for."""
        config = self.config
        if config.form != "auto":
            return PairVectors if config.form == "factorised" else DensePairVectors
        dropout = self.training and config.use_increment and config.increment.dropout > 0
        return DensePairVectors if dropout else PairVectors

    def forward(self, text: TextFeatures, video: VideoFeatures, increments: bool = False) -> Scores:
        """Score N texts against M videos, block by block.

        Args:
            text: features of N texts with W words.
            video: features of M videos with F frames.
            increments: whether the increments are wanted too.

        Returns:
            `similarity` (N, M), cosines of Eq. 4; on demand the increments (N, M, D) as the part `increment`.

        Raises:
            ValueError: increments are wanted but there are none, or another number of frames than the query without
                gap was built for.
        """
        if increments and self.psi is None:
            raise ValueError("use_increment is off: there are no increments to return")
        if self.magnitude is not None and video.frames.shape[1] != self.frames:
            raise ValueError(
                f"GARE without gap was built for {self.frames} frames, got {video.frames.shape[1]}: set "
                "model.init_args.frames, or those of the data"
            )
        text, video = text.float(), video.float()
        bytes_of_a_pair = self._pair_bytes(text, increments)
        budget = 2**20 * (self.config.memory_budget or (16 if text.sentence.device.type == "cpu" else 1024))
        with torch.autocast(text.sentence.device.type, enabled=False):
            if self.config.increment.context == "frames":
                return score_in_blocks(
                    lambda some, few: self._score_block(some, few, increments), text, video, bytes_of_a_pair, budget
                )
            # The basis belongs to the texts, so few texts at a time, and what belongs to them is prepared once.
            scores = score_in_blocks(
                lambda many, few: _swapped(self._score_block(few, many, increments)),
                video,
                text,
                bytes_of_a_pair,
                budget,
            )
        return _swapped(scores)

    def increments(self, texts: Pairwise, means: Pairwise, text: TextFeatures, video: VideoFeatures) -> Pairwise:
        """Return the increment of every pair (Eq. 7).

        Args:
            texts: t_i of every pair.
            means: v_j of every pair, the mean of its frames.
            text: features of the N texts.
            video: features of the M videos.
        """
        assert self.psi is not None  # callers ask for increments only where there are some
        config = self.config.increment
        of_words = config.context == "words"
        context = text.words if of_words else video.frames
        mask = (text.word_mask if of_words else video.frame_mask) if self._masks_context else None
        side: Side = "text" if of_words else "video"
        if config.query == "text":
            direction = (means - self.psi(texts, context, mask, side)).unit()
            return direction.scale(self._magnitudes(text, video))
        gap = means - texts if config.sign == 1 else texts - means
        return self.psi(gap, context, mask, side)

    def pooled(self, texts: Pairwise, means: Pairwise, video: VideoFeatures) -> Pairwise:
        """Return the video vector of every pair (released: softmax over the frames of t . V / temperature)."""
        if self.config.pooling.kind == "mean":
            return means
        logits = texts.dot_frames(video.frames) / (self.config.pooling.temperature or 3.0)  # (M, F, N, 1)
        mask = video.frame_mask[:, :, None, None]
        if self.config.mask_frames:
            logits = logits.masked_fill(~mask.bool(), torch.finfo(logits.dtype).min)
        # Padded frames lose their weight after the softmax, and the rest is not scaled up, as released.
        return type(texts).mix(logits.softmax(1) * mask.to(logits.dtype), video.frames)

    def geometry(self, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
        """Return what Figures 3 and 8 show of every pair, by name, (N, M) each, for corrected texts.

        `angle_to_gap` and `angle_to_text` of the increment in radians, `increment_norm`, `text_norm`, `corrected_norm`,
        and the Euclidean distances `text_to_video` and `corrected_to_video`.

        Raises:
            ValueError: there are no increments, or videos are corrected.
        """
        if self.psi is None or self.config.increment.corrected == "video":
            raise ValueError("the geometry of corrected texts needs use_increment and increment.corrected: text")
        text, video = text.float(), video.float()
        texts, means = self._items(text, video)
        increment, gap = self.increments(texts, means, text, video), means - texts
        corrected = texts + increment
        found = {
            "angle_to_gap": _cosine(increment, gap).clamp(-1, 1).acos(),
            "angle_to_text": _cosine(increment, texts).clamp(-1, 1).acos(),
            "increment_norm": increment.norm(),
            "text_norm": texts.norm(),
            "corrected_norm": corrected.norm(),
            "text_to_video": gap.norm(),
            "corrected_to_video": (corrected - means).norm(),
        }
        return {name: value.squeeze(-1).T for name, value in found.items()}

    def mean_frames(self, video: VideoFeatures) -> Tensor:
        """Return v_j (M, D), the mean of the frames; padded ones count unless `mask_frames` (modeling.py)."""
        return masked_mean(video.frames, video.frame_mask) if self.config.mask_frames else video.frames.mean(1)

    @property
    def _masks_context(self) -> bool:
        mask = self.config.increment.mask_context
        return self.config.increment.context == "words" if mask is None else mask

    def _items(self, text: TextFeatures, video: VideoFeatures) -> tuple[Pairwise, Pairwise]:
        texts = self.form.from_texts(text.sentence.unsqueeze(1), videos=len(video))
        return texts, self.form.from_videos(self.mean_frames(video).unsqueeze(1), texts=len(text))

    def _magnitudes(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """Return the (M, N, 1) lengths exp(linear(cosines of the text with the frames)) (Table 5)."""
        assert self.magnitude is not None
        cosines = torch.einsum("nd,mfd->mnf", unit(text.sentence), unit(video.frames))
        cosines = cosines * video.frame_mask[:, None].to(cosines.dtype)
        weight, bias = self.magnitude.weight.to(cosines.dtype), self.magnitude.bias.to(cosines.dtype)
        return nn.functional.linear(cosines, weight, bias).exp()

    def _score_block(self, text: TextFeatures, video: VideoFeatures, increments: bool) -> Scores:
        texts, means = self._items(text, video)
        videos, parts = self.pooled(texts, means, video), {}
        if self.psi is not None:
            increment = self.increments(texts, means, text, video)
            if self.config.increment.corrected == "text":
                texts = texts + increment
            else:
                videos = videos + increment
            if increments:
                parts["increment"] = increment.materialize().squeeze(2)
        return Scores(_cosine(texts, videos).squeeze(-1).T, parts)

    def _pair_bytes(self, text: TextFeatures, increments: bool) -> int:
        """Return about how much memory a pair takes while it is scored."""
        basis = self.frames + (text.words.shape[1] if self.config.increment.context == "words" else 0) + 4
        numbers = 8 * self.dimension if self.form is DensePairVectors else 8 * basis
        return text.sentence.element_size() * (numbers + increments * self.dimension)


def _cosine(a: Pairwise, b: Pairwise) -> Tensor:
    return a.inner(b) / (a.norm() * b.norm())


def _swapped(scores: Scores) -> Scores:
    """Return scores with texts and videos exchanged, in the parts too."""
    parts = {name: part.transpose(0, 1) for name, part in scores.parts.items()}
    return Scores(scores.similarity.T, parts)


# Regularization of the increments (sections 2.2 and 2.3)


def relaxed_bottleneck(increment: Tensor, config: BottleneckConfig) -> Tensor:
    """KL divergence of the anchors' Gaussians from the prior, averaged over anchors (Eq. 15; modeling.py).

    Args:
        increment: (N, M, D); at least two on the side that is no anchor.
        config: anchor, prior and reduction over D; its weight is not applied.

    Returns:
        Scalar. Variances are unbiased, and 1e-6 is added to the deviations, as released.
    """
    increment = unit(increment) if config.normalize else increment
    over = 0 if config.anchor == "video" else 1
    # An anchor's increments may be as good as equal. Their deviation, and its gradient most of all, would then be the
    # rounding of their mean; differences from one of them are exact in float32, and have the same deviation.
    differences = increment - increment.narrow(over, 0, 1).detach()
    mean, deviation = increment.mean(over), differences.std(over) + 1e-6
    ratio = deviation / config.prior
    divergence = 0.5 * (ratio.square() + (mean / config.prior).square() - 1) - ratio.log()
    return (divergence.sum(-1) if config.reduction == "sum" else divergence.mean(-1)).mean()


def norm_variance(increment: Tensor, config: NormVarianceConfig) -> Tensor:
    """Minus the variance of the lengths of each text's increments, or its smooth form (Eq. 10, appendix C.3).

    Args:
        increment: (N, M, D), M at least 2.
        config: kind and floor; its weight is not applied.

    Returns:
        Scalar; of the kind `variance`, 0 without gradient where it would be below minus the floor (modeling.py).
    """
    length = increment.norm(dim=-1)
    if config.kind == "log-sum-exp":
        spread = (length - length.mean(1, keepdim=True)).square()
        return (1 + (-spread).exp().mean(1)).log().mean()
    value = -length.var(1).mean()
    return torch.where(value >= -(config.floor or 0.5), value, 0.0)


def directional_diversity(increment: Tensor, config: DirectionConfig) -> Tensor:
    """How much the directions of each text's increments agree (Eq. 11, appendix C.2).

    Args:
        increment: (N, M, D).
        config: kind and alpha; its weight is not applied.

    Returns:
        Scalar. A direction is compared with itself too in `log-mean-exp` (as released), and not in `orthogonal`.
    """
    direction = unit(increment)
    cosine = direction @ direction.transpose(1, 2)  # (N, M, M)
    if config.kind == "orthogonal":
        others = ~torch.eye(cosine.shape[1], dtype=torch.bool, device=cosine.device)
        return (cosine.square() * others).mean((1, 2)).mean()
    agreement = (-(config.alpha or 2.0) * (1 - cosine)).exp().mean((1, 2))
    return (agreement + 1e-8).log().mean()


def trust_region_step(increment: Tensor, gradient: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """The longest step of steepest descent that stays within the trust region (Eqs. 37 to 40).

    What psi learns to predict, in closed form: alpha = d . g + sqrt((d . g)^2 - |d|^2 + radius^2) with the direction g
    of the gradient. Training does not use it; appendix H.5 compares with it.

    Args:
        increment: (..., D) increments d, none longer than `radius`.
        gradient: (..., D) gradients of the loss with respect to them, none zero.
        radius: of the trust region.

    Returns:
        The increments (..., D) after the step, of length `radius`, and the lengths alpha (...) of the steps.

    Raises:
        ValueError: an increment is outside the trust region, or a gradient is zero.
    """
    direction = gradient / gradient.norm(dim=-1, keepdim=True)
    if not bool(direction.isfinite().all()):
        raise ValueError("trust_region_step: a gradient of zero or one that is not finite has no direction")
    squared = increment.square().sum(-1)
    if bool((squared > radius**2 * (1 + 1e-5)).any()):
        longest = float(squared.max().sqrt())
        raise ValueError(f"trust_region_step: an increment of length {longest:g} is outside the radius {radius:g}")
    along = (increment * direction).sum(-1)
    alpha = along + (along.square() - squared + radius**2).clamp(min=0).sqrt()
    return increment - alpha.unsqueeze(-1) * direction, alpha


class GARE(RetrievalModule):
    """GARE: psi's increment for every pair, text-conditioned pooling, and what shapes the increments.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give.
        contrast: what else the contrastive loss does with logits.
        temporal_layers: blocks of the temporal transformer (released: 4, on MSVD 0, which builds none).
        pooling: how frames become the vector that a text is compared with.
        use_increment: whether pairs have increments; without, what is left is the baseline of Table 3.
        increment: psi's inputs, and the side that the increment corrects (Tables 4, 5 and 7).
        bottleneck: relaxed information bottleneck (Eq. 15).
        norm_variance: regularization of the increments' lengths (Eq. 10).
        direction: regularization of the increments' directions (Eq. 11).
        mask_frames: leave padded frames out of the pooling's softmax and of the mean of the frames. The released code
            takes their weights away after the softmax, and counts them in the mean.
        fixed_temperature: tau that is not learnt (paper: 0.01); None learns CLIP's, as released.
        form: `factorised` never builds a vector per pair, `dense` does, `auto` takes the former but where training
            with dropout needs the latter.
        memory_budget: memory for one block of pairs in MiB; by default 16 on a CPU, 1024 elsewhere.

    Raises:
        ValueError: a value out of range, or switches that do not fit each other.
    """

    def __init__(
        self,
        encoder: Encoder,
        optimizer: OptimizerConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        words: int = 32,
        frames: int = 12,
        gather: Gather = "global",
        contrast: ContrastiveLearning | None = None,
        temporal_layers: int = 4,
        pooling: PoolingConfig | None = None,
        use_increment: bool = True,
        increment: IncrementConfig | None = None,
        bottleneck: BottleneckConfig | None = None,
        norm_variance: NormVarianceConfig | None = None,
        direction: DirectionConfig | None = None,
        mask_frames: bool = False,
        fixed_temperature: float | None = None,
        form: PairwiseForm = "auto",
        memory_budget: int | None = None,
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather, contrast)
        if temporal_layers < 0:
            raise ValueError(f"temporal_layers is {temporal_layers}; it must be at least 0")
        if fixed_temperature is not None:
            if fixed_temperature < 0.01:
                raise ValueError(
                    f"fixed_temperature is {fixed_temperature}; it must be at least 0.01, as 1 / temperature is kept "
                    "at or below 100"
                )
            self.temperature.logit_scale.data.fill_(-math.log(fixed_temperature))
            self.temperature.requires_grad_(False)
        self.temporal = temporal_transformer(encoder, temporal_layers, frames) if temporal_layers else None
        config = GAREConfig(
            pooling=pooling or PoolingConfig(),
            use_increment=use_increment,
            increment=increment or IncrementConfig(),
            bottleneck=bottleneck or BottleneckConfig(),
            norm_variance=norm_variance or NormVarianceConfig(),
            direction=direction or DirectionConfig(),
            mask_frames=mask_frames,
            form=form,
            memory_budget=memory_budget,
        )
        self.head = GAREHead(encoder.dimension, frames, config)

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Relate the frames (M, F, D) over time, unless there are no temporal layers."""
        if self.temporal is None:
            return video
        return dataclasses.replace(video, frames=self.temporal(video.frames, video.frame_mask))

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos.

        Returns:
            `similarity` (N, M): cosines of corrected texts and pooled videos, or of texts and corrected videos.
        """
        return self.head(text, video)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop the words of N texts unless psi attends to them."""
        config = self.head.config
        if config.use_increment and config.increment.context == "words":
            return text
        return text.without_words()

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return scalars: InfoNCE and the weighted regularization of B matching pairs' B x B increments (Eq. 28).

        A single pair has no variances: the terms that need them are left out, with a warning.
        """
        config = self.head.config
        weights = (config.bottleneck.weight, config.norm_variance.weight, config.direction.weight)
        shaped = config.use_increment and any(weights)
        if shaped and len(pairs.text) < 2:
            warnings.warn("GARE: a batch of one pair has no variances; only InfoNCE is trained on it", stacklevel=2)
            shaped = False
        scores = self.head(pairs.text, pairs.video, increments=shaped)
        terms = {"info_nce": info_nce(self.contrastive_logits(self.temperature() * scores.similarity))}
        if not shaped:
            return terms
        increment = scores.parts["increment"]
        if config.bottleneck.weight:
            terms["bottleneck"] = config.bottleneck.weight * relaxed_bottleneck(increment, config.bottleneck)
        if config.norm_variance.weight:
            terms["norm_variance"] = config.norm_variance.weight * norm_variance(increment, config.norm_variance)
        if config.direction.weight:
            terms["direction"] = config.direction.weight * directional_diversity(increment, config.direction)
        return terms
