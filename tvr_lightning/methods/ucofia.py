"""UCoFiA: Unified Coarse-to-Fine Alignment for Video-Text Retrieval (Wang et al., ICCV 2023).

Three alignments: video with sentence, frames with sentence, and a few patches per frame with words, each aggregated by
interactive similarity attention. Follows the released training code (Ziyang412/UCoFiA, train/modules).

Deviations:
- evaluated model: released text-to-video folder has another patch predictor and neither folder has the matrix L1, so
  that a checkpoint of the training code does not load there; here the training code's model. Both are options
  (`patch_selection.predictor`, `patch_matrix`).
- noise: released selectors draw it at evaluation too, and scores change from run to run; here evaluation takes the k
  best patches (`patch_selection.noise_eval` draws).
- score normalisation: released by default with all training queries, for each of the three scores by itself; here off,
  and of the total where the recipe asks for a normaliser.
- unused parameters: released creates some; here they are left out.
- ties: released counts a tied query several times; here they are ranked by their expectation.
- gradient of the gather: released each device's own slice (`gather: own-slice`); here the exact one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import Record, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import BidirectionalAggregation, SimilarityAggregation, aggregation
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.patch_selector import PatchSelectionConfig, PatchSelector
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.pairwise import score_in_blocks
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.optim import OptimizerConfig

UCoFiAScore = Literal["video_sentence", "sentence_frame", "word_patch"]


@dataclass
class PreparedVideo(Record):
    """What the alignments read of M videos.

    Attributes:
        pooled: (M, D) unit vectors of the videos.
        frames: (M, F, D) CLIP's own frames at unit length.
        patches: (M, F P', D) selected patches of all frames in a row; as CLIP gives them unless they are normalised.
    """

    pooled: Tensor
    frames: Tensor
    patches: Tensor | None


class UCoFiAHead(nn.Module):
    """Features to the scores (N, M) of up to three alignments and their mean.

    Args:
        dimension: D.
        words: W.
        frames: F.
        patches: P', patches per frame, CLS included.
        scores, similarity_aggregation, softmax_lambda, patch_matrix, normalize_patches, scale_word_patch: as in
            `UCoFiA`.
    """

    def __init__(
        self,
        dimension: int,
        words: int,
        frames: int,
        patches: int = 4,
        scores: tuple[UCoFiAScore, ...] = get_args(UCoFiAScore),
        similarity_aggregation: SimilarityAggregation = "isa",
        softmax_lambda: float = 100.0,
        patch_matrix: bool = True,
        normalize_patches: bool = False,
        scale_word_patch: bool = False,
    ) -> None:
        super().__init__()
        self.words, self.frames, self.patches = words, frames, patches
        self.scores = tuple(name for name in get_args(UCoFiAScore) if name in scores)
        self.normalize_patches, self.scale_word_patch = normalize_patches, scale_word_patch
        if "video_sentence" in scores:
            self.sentence_matrix = nn.Parameter(torch.eye(dimension))
            self.video_matrix = nn.Parameter(torch.eye(dimension))
        if "sentence_frame" in scores:
            self.sentence_frame = aggregation(similarity_aggregation, frames, softmax_lambda)
        if "word_patch" in scores:
            self.word_matrix = nn.Parameter(torch.eye(dimension))
            self.patch_matrix = nn.Parameter(torch.eye(dimension)) if patch_matrix else None
            self.word_patch = BidirectionalAggregation(similarity_aggregation, frames * patches, words, softmax_lambda)

    def forward(self, text: TextFeatures, video: VideoFeatures, scale: Tensor) -> Scores:
        """Score N texts against M videos, block by block.

        Args:
            text: sentence (N, D), words (N, W, D).
            video: `frames` (M, F, D) after the temporal encoder, `clip_frames` before it, `patches` (M, F, P', D).
            scale: exp(logit_scale), scalar.

        Returns:
            `similarity` (N, M), the mean of the alignments divided by the scale where they have it, so that times the
            scale it is the released logits; `parts`: the alignments' scores without the scale.

        Raises:
            ValueError: other numbers of words, frames or patches than the head's matrices are for.
        """
        with torch.autocast(text.sentence.device.type, enabled=False):
            text, video = text.float(), video.float()
            prepared = self._prepared(text, video)
            texts = TextFeatures(unit(text.sentence), unit(text.words), text.word_mask)
            cells = self.words * self.frames * self.patches if "word_patch" in self.scores else self.frames
            budget = 2**20 * (64 if text.sentence.device.type == "cpu" else 1024)
            return score_in_blocks(
                lambda some, few: self._score_block(some, few, scale),
                texts,
                prepared,
                8 * text.sentence.element_size() * cells,
                budget,
            )

    def _prepared(self, text: TextFeatures, video: VideoFeatures) -> PreparedVideo:
        found = (text.words.shape[1], video.frames.shape[1])
        if found != (self.words, self.frames):
            raise ValueError(
                f"UCoFiA was built for {self.words} words and {self.frames} frames, its matrices fit no others; got "
                f"{found[0]} words and {found[1]} frames: set model.init_args.words and frames, or those of the data"
            )
        patches = None
        if "word_patch" in self.scores:
            if video.patches is None or video.patches.shape[2] != self.patches:
                raise ValueError(
                    f"UCoFiA aligns words with {self.patches} patches per frame, which encode_video selects"
                )
            patches = video.patches.flatten(1, 2)
            patches = unit(patches) if self.normalize_patches else patches
        before = video.frames if video.clip_frames is None else video.clip_frames
        return PreparedVideo(unit(masked_mean(unit(video.frames), video.frame_mask)), unit(before), patches)

    def _score_block(self, text: TextFeatures, video: PreparedVideo, scale: Tensor) -> Scores:
        parts = {}
        if "video_sentence" in self.scores:
            parts["video_sentence"] = text.sentence @ self.sentence_matrix @ (video.pooled @ self.video_matrix).T
        if "sentence_frame" in self.scores:
            parts["sentence_frame"] = self.sentence_frame(torch.einsum("nd,mfd->fnm", text.sentence, video.frames))
        if "word_patch" in self.scores and video.patches is not None:
            patches = video.patches if self.patch_matrix is None else video.patches @ self.patch_matrix
            similarity = torch.einsum("nwd,mpd->pwnm", text.words @ self.word_matrix, patches)
            parts["word_patch"] = self.word_patch(similarity)
        scaled = [
            part / scale if name == "word_patch" and not self.scale_word_patch else part for name, part in parts.items()
        ]
        return Scores(torch.stack(scaled).mean(0), parts)


class UCoFiA(RetrievalModule):
    """UCoFiA with its three alignments.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give.
        contrast: what else the contrastive loss does with logits.
        temporal_layers: blocks of the temporal transformer behind the video (released: 4); 0 builds none.
        scores: which of the three alignments are averaged.
        patch_selection: patches of every frame.
        similarity_aggregation: `isa` (two softmaxes with a matrix between them), plain `softmax`, or `mean`.
        softmax_lambda: factor inside the softmaxes (released: 100).
        patch_matrix: learn L1, which maps patches; the released evaluation codes lack it.
        normalize_patches: bring patches to unit length; released: not, so that the softmaxes over them are hard.
        scale_word_patch: multiply the word-patch score by exp(logit_scale) as the others are; released: not.

    Raises:
        ValueError: a value out of range, or options of which one makes another senseless.
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
        scores: tuple[UCoFiAScore, ...] = get_args(UCoFiAScore),
        patch_selection: PatchSelectionConfig | None = None,
        similarity_aggregation: SimilarityAggregation = "isa",
        softmax_lambda: float = 100.0,
        patch_matrix: bool = True,
        normalize_patches: bool = False,
        scale_word_patch: bool = False,
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather, contrast)
        scores = tuple(scores)
        if not scores or len(set(scores)) < len(scores) or set(scores) - set(get_args(UCoFiAScore)):
            raise ValueError(f"scores is {list(scores)}; name some of {', '.join(get_args(UCoFiAScore))}, each once")
        if softmax_lambda <= 0:
            raise ValueError(f"softmax_lambda is {softmax_lambda}; it must be above 0")
        if temporal_layers < 0:
            raise ValueError(f"temporal_layers is {temporal_layers}; it must be at least 0")
        if temporal_layers and "video_sentence" not in scores:
            raise ValueError("only video_sentence reads the temporal encoder: set temporal_layers to 0, or add it")
        if "word_patch" not in scores and (
            patch_selection or normalize_patches or scale_word_patch or not patch_matrix
        ):
            raise ValueError("options of patches need word_patch among scores: add it, or leave them at their defaults")
        if scores == ("video_sentence",) and (similarity_aggregation != "isa" or softmax_lambda != 100.0):
            raise ValueError("video_sentence alone aggregates nothing: leave similarity_aggregation and softmax_lambda")
        if similarity_aggregation == "mean" and softmax_lambda != 100.0:
            raise ValueError("similarity_aggregation: mean has no softmax; drop softmax_lambda")
        self.needs_patches = "word_patch" in scores
        self.temporal = temporal_transformer(encoder, temporal_layers, frames) if temporal_layers else None
        selection = patch_selection or PatchSelectionConfig()
        self.selector = PatchSelector(encoder.dimension, selection) if self.needs_patches else None
        self.head = UCoFiAHead(
            encoder.dimension,
            words,
            frames,
            1 + selection.kept,
            scores,
            similarity_aggregation,
            softmax_lambda,
            patch_matrix,
            normalize_patches,
            scale_word_patch,
        )

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Select patches (M, F, P', D) of every frame and relate the frames (M, F, D), keeping CLIP's own."""
        patches = None
        if self.selector is not None:
            if video.patches is None:
                raise ValueError("UCoFiA's word_patch needs patches, which the encoder was not asked for")
            patches = self.selector(video.frames, video.patches)
        frames = video.frames if self.temporal is None else self.temporal(video.frames, video.frame_mask)
        return dataclasses.replace(video, frames=frames, clip_frames=video.frames, patches=patches)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos.

        Returns:
            `similarity` (N, M): the mean of the alignments on the scale of a cosine; `parts`: the alignments.
        """
        scores: Scores = self.head(text, video, self.temperature())
        return scores
