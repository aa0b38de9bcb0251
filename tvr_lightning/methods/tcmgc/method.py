"""TC-MGC: Text-Conditioned Multi-Grained Contrastive Learning for Text-Video Retrieval (Jing, Yang, Chu, 2025).

Read beside section 3 of the paper. Defaults are those of the released code (JingXiaolun/TC-MGC, modeling_tcmgc.py,
module_xpool.py).

Deviations:
- interaction matrices: paper none (Eqs. 12, 15); released learns G and L; here as released (`interaction_matrices`).
- projections: paper W_Q, W_K, W_V and W_O (Eqs. 2-6); released none; here as released (`attention.projections`).
- temporal encoder: paper 3 layers; released 4; here as released (`temporal_layers`).
- factor in the softmaxes over slots: paper none in Eqs. 18-29, 100 in Table 13; released 100; here 100
  (`softmax_lambda`).
- scale of LSA: paper weights from cosines (Eq. 31); released from logits; here as released (`aggregation_on`).
- scale of SDR: paper variance of cosines (Eq. 36); released of logits; here as released (`decorrelation.scores`).
- InfoNCE: paper sum of both directions (Eq. 35); released their mean; here as released (`loss_reduction`).
- LSA matrix: paper G x G (Eq. 32); released undefined (`logit_weight`); here the paper's, starting as the identity.
- padding: released keeps padded words and frames; here as released (`mask_words`, `mask_frames`).
- repeated work: released computes all text-conditioned vectors twice; here once.
- ties: released counts a tied query several times; here they are ranked by their expectation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import PairedFeatures, Record, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import (
    BidirectionalAggregation,
    SimilarityAggregation,
    aggregation,
)
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.methods.tcmgc.options import (
    AttentionConfig,
    Contrast,
    DecorrelationConfig,
    PairwiseForm,
    ReorganizationConfig,
    ScoreAggregation,
    ScoreScale,
    TCMGCConfig,
)
from tvr_lightning.methods.tcmgc.reorganization import Reorganization, kept_slots, reorganize
from tvr_lightning.pairwise import (
    DensePairVectors,
    PairVectors,
    Pairwise,
    TextConditionedAttention,
    score_in_blocks,
)
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.losses import Reduction, info_nce
from tvr_lightning.training.optim import OptimizerConfig

__all__ = [
    "TCMGC",
    "AttentionConfig",
    "Contrast",
    "DecorrelationConfig",
    "PairwiseForm",
    "ReorganizationConfig",
    "ScoreAggregation",
    "ScoreScale",
    "TCMGCConfig",
    "TCMGCHead",
    "similarity_decorrelation",
]


def similarity_decorrelation(
    scores: Tensor, pairs: Literal["positives", "negatives", "all"] = "positives", unbiased: bool = True
) -> Tensor:
    """Variance of the scores of a pair over the granularities, averaged over pairs (Eq. 36, Table A.1).

    Args:
        scores: (G, B, B) scores of B texts and B videos at G granularities; row i matches column i.
        pairs: which pairs count.
        unbiased: whether the variance divides by G - 1.

    Returns:
        Scalar; 0 when all granularities agree.
    """
    variance = scores.var(0, correction=int(unbiased))
    if pairs == "all":
        return variance.mean()
    matching = torch.eye(len(variance), dtype=torch.bool, device=variance.device)
    return variance[matching if pairs == "positives" else ~matching].mean()


class LinearSoftmaxAggregation(nn.Module):
    """LSA: weights of scores of several granularities from a softmax over a linear map of them (TC-MGC, Eqs. 31-32).

    Args:
        scores: G, rows and columns of the matrix (G, G), which starts as the identity.
    """

    def __init__(self, scores: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(scores))

    def forward(self, scores: Tensor) -> Tensor:
        """Return (G, N, M) weights that add up to 1 over the G scores (G, N, M) of every pair."""
        return torch.einsum("gnm,gh->hnm", scores, self.weight.to(scores.dtype)).softmax(0)


@dataclass
class PreparedText(Record):
    """What the head needs of N texts.

    Attributes:
        queries: (N, 1 + W, D) vectors to attend with, the sentence first.
        sentence: (N, 1, D) at unit length.
        words: (N, W, D) at unit length.
        word_mask: (N, W), True where there is a token.
    """

    queries: Tensor
    sentence: Tensor
    words: Tensor
    word_mask: Tensor


class TCMGCHead(nn.Module):
    """Features of texts and videos to four scores per pair and their aggregate (sections 3.2 to 3.6).

    Args:
        dimension: D.
        words: W, the word slots.
        frames: F.
        config: switches.

    Raises:
        ValueError: switches, sizes and keep rate do not fit each other.
    """

    def __init__(self, dimension: int, words: int, frames: int, config: TCMGCConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or TCMGCConfig()
        self.dimension, self.words, self.frames = dimension, words, frames
        # A word asks for a frame of its own, so conditioned frames are as many as words (Eq. 11).
        self.frame_slots = words if config.conditioning else frames
        attention = config.attention
        self.attention: TextConditionedAttention | None = None
        if config.conditioning:
            self.attention = TextConditionedAttention(
                dimension,
                attention.heads,
                attention.dropout,
                attention.projections,
                attention.residual,
                initialization="normal",
            )
            if config.form == "factorised" and attention.heads * frames >= dimension:
                raise ValueError(
                    f"form: factorised needs fewer basis vectors than dimensions, but {attention.heads} heads over "
                    f"{frames} frames make {attention.heads * frames} of {dimension}: use form auto or dense"
                )
        self._build_contrasts()
        self.lsa = LinearSoftmaxAggregation(len(config.contrasts)) if config.aggregation == "lsa" else None

    def _build_contrasts(self) -> None:
        """Build the matrices of the contrasts that are made; others would wait for a gradient in vain."""
        config, modes = self.config, self.config.reorganization
        kind, temperature = config.similarity_aggregation, config.softmax_lambda
        self._kept: dict[str, int] = {}

        def slots(count: int, mode: Reorganization, name: str) -> int:
            self._kept[name] = kept_slots(count, config.keep_rate, mode, name)
            return self._kept[name] + (mode == "fusion")

        square = torch.eye(self.dimension) if config.interaction_matrices else None
        self.global_matrix = self.local_matrix = None
        if "video_sentence" in config.contrasts and square is not None:
            self.global_matrix = nn.Parameter(square.clone())
        if "video_word" in config.contrasts:
            count = slots(self.words, modes.video_word, "video_word")
            self.video_word_aggregation = aggregation(kind, count, temperature)
        if "sentence_frame" in config.contrasts:
            count = slots(self.frame_slots, modes.sentence_frame, "sentence_frame")
            self.sentence_frame_aggregation = aggregation(kind, count, temperature)
        if "frame_word" in config.contrasts:
            self.local_matrix = None if square is None else nn.Parameter(square.clone())
            words = slots(self.words, modes.words, "words")
            frames = slots(self.frame_slots, modes.frames, "frames")
            self.frame_word_aggregation = BidirectionalAggregation(kind, frames, words, temperature)

    @property
    def form(self) -> type[Pairwise]:
        """The form of pair vectors that the options, the sizes and the mode (training or not) ask for."""
        config = self.config
        if config.form != "auto":
            return PairVectors if config.form == "factorised" else DensePairVectors
        if config.conditioning:
            dropout = self.training and config.attention.dropout > 0
            if dropout or config.attention.heads * self.frames >= self.dimension:
                return DensePairVectors
        return PairVectors

    def forward(self, text: TextFeatures, video: VideoFeatures, scale: Tensor) -> Scores:
        """Score N texts against M videos, block by block.

        Args:
            text: features of N texts with W words.
            video: features of M videos with F frames; `clip_frames` too where conditioning is off.
            scale: exp(logit_scale), scalar.

        Returns:
            `similarity` (N, M), the aggregate on the scale of a cosine (Eq. 32), and the contrasts' scores as `parts`.

        Raises:
            ValueError: another number of words or frames than the head was built for, or no `clip_frames`.
        """
        self._check(text, video)
        text, video = text.float(), video.float()
        with torch.autocast(text.sentence.device.type, enabled=False):
            return score_in_blocks(
                lambda some, few: self._score_block(some, few, scale),
                self._prepared(text),
                video,
                self._pair_bytes(text.sentence.element_size()),
                self._budget(text.sentence.device),
            )

    def aggregate(self, scores: Tensor, scale: Tensor) -> Tensor:
        """Return the weighted sum (N, M) of the contrasts' cosines (G, N, M) (Eqs. 31-32, Figs. 7-8)."""
        if self.config.aggregation == "mean":
            return scores.mean(0)
        weighed = scores * scale if self.config.aggregation_on == "logits" else scores
        weights = weighed.softmax(0) if self.lsa is None else self.lsa(weighed)
        return (weights * scores).sum(0)

    def decorrelation(self, scores: Scores, scale: Tensor) -> Tensor:
        """Return the unweighted regularization (Eq. 36) of B texts and their B videos, scalar."""
        config = self.config.decorrelation
        stacked = torch.stack(list(scores.parts.values()))
        stacked = stacked * scale if config.scores == "logits" else stacked
        return similarity_decorrelation(stacked, config.pairs, config.unbiased)

    def visual_vectors(self, text: PreparedText, video: VideoFeatures) -> tuple[Pairwise, Pairwise]:
        """Return unit video vectors z^c (one slot) and frame vectors z^f (a slot per word) of all pairs (Eqs. 2-11)."""
        form = self.form
        if self.attention is None:
            assert video.clip_frames is not None  # checked in forward
            pooled = unit(masked_mean(unit(video.frames), video.frame_mask)).unsqueeze(1)
            return form.from_videos(pooled, len(text)), form.from_videos(unit(video.clip_frames), len(text))
        queries = form.from_texts(text.queries, videos=len(video))
        frame_mask = video.frame_mask if self.config.mask_frames else None
        conditioned = self.attention(queries, video.frames, frame_mask).unit()
        return conditioned.select(0, 1), conditioned.select(1, conditioned.slots)

    def _score_block(self, text: PreparedText, video: VideoFeatures, scale: Tensor) -> Scores:
        coarse, fine = self.visual_vectors(text, video)
        config, parts = self.config, {}
        if "video_sentence" in config.contrasts:  # Eq. 12; the matrix G is the released code's
            parts["video_sentence"] = coarse.dot(text.sentence, self.global_matrix)[:, :, 0, 0].T
        if "video_word" in config.contrasts:  # Eqs. 13, 18-19
            similarity = self._without_padding(coarse.dot(text.words), text, video, words=True, frames=False)
            similarity = self._reorganized(similarity, "video_word", dim=2)  # (k, M, N, 1)
            parts["video_word"] = self.video_word_aggregation(similarity)[:, :, 0].T
        if "sentence_frame" in config.contrasts:  # Eqs. 14, 20-21
            similarity = self._without_padding(fine.dot(text.sentence), text, video, words=False, frames=True)
            similarity = self._reorganized(similarity, "sentence_frame", dim=3)  # (k + 1, M, N, 1)
            parts["sentence_frame"] = self.sentence_frame_aggregation(similarity)[:, :, 0].T
        if "frame_word" in config.contrasts:  # Eqs. 15-17, 22-30; the matrix L is the released code's
            similarity = fine.dot(text.words, self.local_matrix)
            similarity = self._without_padding(similarity, text, video, words=True, frames=True)
            similarity = self._reorganized(similarity, "words", dim=2)  # (k, M, N, frame slots)
            similarity = self._reorganized(similarity, "frames", dim=3)  # (k, k, M, N)
            parts["frame_word"] = self.frame_word_aggregation(similarity).T
        return Scores(self.aggregate(torch.stack(list(parts.values())), scale), parts)

    def _reorganized(self, similarity: Tensor, name: str, dim: int) -> Tensor:
        mode: Reorganization = getattr(self.config.reorganization, name)
        return reorganize(similarity, self._kept[name], mode, dim)

    def _without_padding(
        self, similarity: Tensor, text: PreparedText, video: VideoFeatures, words: bool, frames: bool
    ) -> Tensor:
        """Return similarities (M, N, words, frame slots) with minus infinity where a slot is padding."""
        config = self.config
        if words and config.mask_words:
            similarity = similarity.masked_fill(~text.word_mask.bool()[None, :, :, None], -torch.inf)
        if frames and config.conditioning and config.mask_words:  # a conditioned frame belongs to a word
            similarity = similarity.masked_fill(~text.word_mask.bool()[None, :, None, :], -torch.inf)
        if frames and not config.conditioning and config.mask_frames:
            similarity = similarity.masked_fill(~video.frame_mask.bool()[:, None, None, :], -torch.inf)
        return similarity

    def _prepared(self, text: TextFeatures) -> PreparedText:
        sentence = text.sentence.unsqueeze(1)
        queries = torch.cat([sentence, text.words], dim=1)
        queries = queries if self.attention is None else self.attention.queries(queries)
        return PreparedText(queries, unit(sentence), unit(text.words), text.word_mask)

    def _check(self, text: TextFeatures, video: VideoFeatures) -> None:
        words, frames = text.words.shape[1], video.frames.shape[1]
        if words != self.words or frames != self.frames:
            raise ValueError(
                f"TC-MGC was built for {self.words} words and {self.frames} frames, its matrices fit no others; "
                f"got {words} words and {frames} frames: set model.init_args.words and frames, or those of the data"
            )
        if self.attention is None and video.clip_frames is None:
            raise ValueError("without conditioning TC-MGC contrasts CLIP's own frames: clip_frames is missing")

    def _pair_bytes(self, element: int) -> int:
        """Return about how much memory a pair takes while it is scored."""
        slots = 1 + self.words
        basis = self.config.attention.heads * self.frames + 2
        vectors = slots * (self.dimension if self.form is DensePairVectors else basis)
        return element * (6 * vectors + 2 * self.words * self.frame_slots)

    def _budget(self, device: torch.device) -> int:
        """Return the memory of one block in bytes: what fits a CPU's caches, more where a block is computed twice."""
        usual = 1024 if device.type != "cpu" else 512 if torch.is_grad_enabled() else 64
        return 2**20 * (self.config.memory_budget or usual)


class TCMGC(RetrievalModule):
    """TC-MGC: language-video attention, four contrasts, similarity reorganization, ISA, LSA and SDR.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give.
        contrast: what else the contrastive loss does with logits.
        temporal_layers: blocks of the temporal transformer (released: 4, the paper writes 3); 0 builds none (Table 10).
        contrasts: which of the four contrasts are made (Table 9), always taken in the paper's order.
        conditioning: whether videos and frames are conditioned on the text. Without, the video is the mean of its unit
            frames and the frames are CLIP's own, as in X-CLIP (Table 4).
        attention: language-video attention.
        keep_rate: r, share of the slots that reorganization keeps, k = int(slots r).
        reorganization: what becomes of the slots that are not kept.
        similarity_aggregation: `isa` (section 3.5), plain `softmax` (Table 4), or `mean`, over the slots.
        softmax_lambda: factor inside the softmaxes over slots (Table 13; 1 is the wording of Eqs. 18-29).
        aggregation: `lsa` (Eqs. 31-32), plain `softmax`, or `mean`, over the contrasts (Figs. 7-8).
        aggregation_on: whether the weights of the contrasts come from `logits` (released) or `cosines` (Eq. 31).
        decorrelation: regularization of the scores (Eqs. 36-37).
        loss_reduction: `mean` (released) or `sum` (Eq. 35) of both directions of InfoNCE.
        interaction_matrices: the released code's D x D matrices G and L between text and video in the video-sentence
            and frame-word contrasts, which Eqs. 12 and 15 do not have.
        mask_frames: leave padded frames out of attention and contrasts; the released code keeps them.
        mask_words: leave padded words out of the contrasts; the released code keeps them.
        form: `factorised` never builds a vector per pair, `dense` does, `auto` takes the cheaper that options allow.
        memory_budget: memory for one block of pairs in MiB; by default 1024, on a CPU 512 in training and 64 otherwise.

    Raises:
        ValueError: switches, sizes and keep rate do not fit each other.
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
        contrasts: tuple[Contrast, ...] = get_args(Contrast),
        conditioning: bool = True,
        attention: AttentionConfig | None = None,
        keep_rate: float = 0.1,
        reorganization: ReorganizationConfig | None = None,
        similarity_aggregation: SimilarityAggregation = "isa",
        softmax_lambda: float = 100.0,
        aggregation: ScoreAggregation = "lsa",
        aggregation_on: ScoreScale = "logits",
        decorrelation: DecorrelationConfig | None = None,
        loss_reduction: Reduction = "mean",
        interaction_matrices: bool = True,
        mask_frames: bool = False,
        mask_words: bool = False,
        form: PairwiseForm = "auto",
        memory_budget: int | None = None,
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather, contrast)
        if temporal_layers < 0:
            raise ValueError(f"temporal_layers is {temporal_layers}; it must be at least 0")
        if temporal_layers and not conditioning and not {"video_sentence", "video_word"} & set(contrasts):
            raise ValueError(
                "without conditioning, the frame contrasts take CLIP's own frames and nothing would use the temporal "
                "encoder: set temporal_layers to 0"
            )
        self.temporal = temporal_transformer(encoder, temporal_layers, frames) if temporal_layers else None
        config = TCMGCConfig(
            contrasts=tuple(contrasts),
            conditioning=conditioning,
            attention=attention or AttentionConfig(),
            keep_rate=keep_rate,
            reorganization=reorganization or ReorganizationConfig(),
            similarity_aggregation=similarity_aggregation,
            softmax_lambda=softmax_lambda,
            aggregation=aggregation,
            aggregation_on=aggregation_on,
            decorrelation=decorrelation or DecorrelationConfig(),
            loss_reduction=loss_reduction,
            interaction_matrices=interaction_matrices,
            mask_frames=mask_frames,
            mask_words=mask_words,
            form=form,
            memory_budget=memory_budget,
        )
        self.head = TCMGCHead(encoder.dimension, words, frames, config)

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Relate the frames (M, F, D) over time (Eq. 1), keeping CLIP's own where they are contrasted."""
        clip_frames = None if self.head.config.conditioning else video.frames
        frames = video.frames if self.temporal is None else self.temporal(video.frames, video.frame_mask)
        return dataclasses.replace(video, frames=frames, clip_frames=clip_frames)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos.

        Returns:
            `similarity` (N, M): aggregated scores on the scale of a cosine; `parts`: the contrasts' cosines.
        """
        return self.head(text, video, self.temperature())

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return scalars: InfoNCE and the weighted similarity decorrelation of B matching pairs (Eqs. 33-37)."""
        scores, scale = self.score(pairs.text, pairs.video), self.temperature()
        logits = self.contrastive_logits(scale * scores.similarity)
        terms = {"info_nce": info_nce(logits, reduction=self.head.config.loss_reduction)}
        weight = self.head.config.decorrelation.weight
        if weight:
            terms["decorrelation"] = weight * self.head.decorrelation(scores, scale)
        return terms
