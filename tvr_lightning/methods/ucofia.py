"""UCoFiA: Unified Coarse-to-Fine Alignment for Video-Text Retrieval (Wang et al., ICCV 2023).

Three alignments (video with sentence, frames with sentence, and a few patches per frame with words), each aggregated by
interactive similarity attention. Follows the released training code (Ziyang412/UCoFiA, train/modules).

Deviations:
- patch shift: paper does not mention it; released wraps the attention of vision blocks 10 and 11 so that patches move
  between neighboring frames, as in TS2-Net; here the encoder's `patch_shift`, which the recipe sets.
- trained attention of vision blocks 10 and 11: released evaluation loads a checkpoint before it wraps the two blocks,
  drops their trained weights, and runs with OpenAI's weights; here uses the trained weights.
  `tvr convert --openai_clip FILE` uses OpenAI's.
- evaluated model: released text-to-video folder has another patch predictor, and neither folder uses the matrix L1
  (`local_mat_weight1`), so that a checkpoint of the training code does not load in the first and is scored without L1
  in the second; here the training code's model. Both are options (`patch_selection.predictor`, `patch_matrix`), and
  `tvr convert --openai_clip FILE` leaves L1 out. `evaluate_as: released` trains with L1 and scores without it.
- noise: released selectors also draw it in evaluation, and scores change from run to run; here evaluation takes the k
  best patches (`patch_selection.noise_eval` or `evaluate_as: released` draws).
- score normalization: released corrects each of the three scores by a separate bias (log weights of Sinkhorn's
  algorithm over all training queries, added before the mean); here off. `evaluate_as: released` adds the three
  biases, and `recipes/variants/ucofia-sinkhorn.yaml` adds one bias to the mean.
- unused parameters: released creates some; here they are left out.
- ties, gradient of the gather, precision: released as CLIP4Clip; here as CLIP4Clip here.
- selection: released selects the best R@1 on the validation split, which on MSR-VTT is the test split; here uses the
  weights of the last step; `results.select_on: val` selects as released, on MSR-VTT
  `recipes/variants/select-on-test.yaml`.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.normalization import SinkhornBias
from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import ISA, Aggregation, BidirectionalAggregation
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.patch_selector import PatchSelection, PatchSelector
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.checks import check_sizes, distinct
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.option_types import Layers, Options, Role, variant
from tvr_lightning.pairwise import chained, mapped_between, token_similarities

UCoFiAScore = Literal["video_sentence", "sentence_frame", "word_patch"]


@dataclass
class UCoFiAOptions(Options):
    """Options of UCoFiA.

    Attributes:
        temporal_layers: number of blocks of the temporal transformer of the video (released: 4); 0 builds none.
        scores: alignments to average, out of the three.
        patch_selection: selection of the patches of every frame.
        similarity_aggregation: aggregation of similarities: `ISA` by default, `SoftmaxAggregation`, or
            `MeanAggregation`.
        patch_matrix: learn L1, which maps patches; the released evaluation code does not have it.
        evaluate_as: `trained` evaluates the trained model; `released` evaluates it as the released code does: without
            L1, with noise in the selection of patches, and with one Sinkhorn bias per alignment from training queries,
            unless `evaluation.normalization` names another. The trained vision blocks are kept.
    """

    temporal_layers: Layers = 4
    scores: tuple[UCoFiAScore, ...] = get_args(UCoFiAScore)
    patch_selection: PatchSelection = field(default_factory=PatchSelection)
    similarity_aggregation: Aggregation = variant(ISA)
    patch_matrix: bool = True
    evaluate_as: Annotated[Literal["trained", "released"], Role.EVALUATION] = "trained"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.scores = distinct("scores", self.scores, UCoFiAScore)
        if self.temporal_layers and "video_sentence" not in self.scores:
            raise UserError(
                "Only video_sentence uses the temporal encoder. Set temporal_layers to 0, or add video_sentence."
            )
        patches = self.patch_selection != PatchSelection() or not self.patch_matrix
        if patches and "word_patch" not in self.scores:
            raise UserError(
                "The options of patches need word_patch in scores. Add it, or leave the options at their defaults."
            )


@dataclass
class UCoFiAText(FeatureBatch):
    """Prepared features of N texts: unit vectors, and those of the alignments in use."""

    mapped: Tensor | None  # sentences (N, D) times the sentence's and the video's matrix
    sentence: Tensor  # (N, 1, D)
    words: Tensor | None  # (N, W, D); the words or the patches, whichever are fewer, are multiplied by L L1^T


@dataclass
class UCoFiAVideo(FeatureBatch):
    """Prepared features of M videos: unit vectors, and selected patches, if they are aligned."""

    pooled: Tensor  # (M, D)
    frames: Tensor  # (M, F, D) of CLIP
    patches: Tensor | None  # (M, F P', D) of all frames, times the temperature of their aggregation


class UCoFiAHead(PairHead):
    """Scores (N, M) of up to three alignments and their mean."""

    def __init__(self, dimension: int, words: int, frames: int, options: UCoFiAOptions) -> None:
        patches = 1 + options.patch_selection.kept
        scores = options.scores
        cells = words * frames * patches if "word_patch" in scores else frames
        super().__init__(dimension, extra=8 * cells, side="both")
        self.options = options
        self.words = words
        self.frames = frames
        aggregation = options.similarity_aggregation
        if "video_sentence" in scores:
            self.sentence_matrix = nn.Parameter(torch.eye(dimension))
            self.video_matrix = nn.Parameter(torch.eye(dimension))
        if "sentence_frame" in scores:
            self.sentence_frame = aggregation.module(frames)
        if "word_patch" in scores:
            self.word_matrix = nn.Parameter(torch.eye(dimension))
            self.patch_matrix = nn.Parameter(torch.eye(dimension)) if options.patch_matrix else None
            self.word_patch = BidirectionalAggregation(aggregation, frames * patches, words)

    @override
    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[UCoFiAText, UCoFiAVideo]:
        check_sizes(text, video, self.words, self.frames)
        sentence, mapped, words, patches = unit(text.sentence), None, None, None
        if "video_sentence" in self.options.scores:  # (s G) . (v G1) = (s G G1^T) . v
            mapped = chained(sentence, self.sentence_matrix.T, self.video_matrix)
        if "word_patch" in self.options.scores:
            assert video.patches is not None  # encode_video selects them
            drops = not self.training and self.options.evaluate_as == "released"
            # (w L) . (p L1) = (w L L1^T) . p
            behind = () if self.patch_matrix is None or drops else (self.patch_matrix.T,)
            patches, words = video.patches.flatten(1, 2), unit(text.words)
            patches, words = mapped_between(patches, words, self.word_matrix, *behind)
            patches = self.word_patch.temperature * patches
        frames = unit(video.frames if video.clip_frames is None else video.clip_frames)
        pooled = unit(masked_mean(unit(video.frames), video.frame_mask))
        return UCoFiAText(mapped, sentence.unsqueeze(1), words), UCoFiAVideo(pooled, frames, patches)

    @override
    def score(self, text: UCoFiAText, video: UCoFiAVideo, scale: Tensor) -> Scores:
        parts = {}
        if text.mapped is not None:
            parts["video_sentence"] = text.mapped @ video.pooled.T
        if "sentence_frame" in self.options.scores:
            similarity = token_similarities(video.frames, text.sentence).squeeze(2)  # (F, m, n)
            parts["sentence_frame"] = self.sentence_frame(similarity, whole=True).T
        if text.words is not None and video.patches is not None:
            similarity = token_similarities(video.patches, text.words)  # (F P', m, W, n)
            # Only this one is divided by exp(logit_scale). Times the scale, the scores are those of the released code.
            parts["word_patch"] = self.word_patch(similarity, words=2, whole=True, scaled=True).T / scale
        return Scores(torch.stack(list(parts.values())).mean(0), parts)


class UCoFiA(RetrievalModule):
    """UCoFiA with its three alignments.

    Args:
        encoder: encoder of texts and videos.
        ucofia: options of UCoFiA.
    """

    def __init__(self, encoder: Encoder, *, ucofia: UCoFiAOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = ucofia or UCoFiAOptions()
        self.averaged_parts = options.scores
        selection = options.patch_selection
        if options.evaluate_as == "released":
            selection = dataclasses.replace(selection, noise_eval=True)
            normalization = self.evaluation_config.normalization or SinkhornBias(per_part=True)
            self.evaluation_config = dataclasses.replace(self.evaluation_config, normalization=normalization)
        self.needs_patches = "word_patch" in options.scores
        self.reads_padding = ("words", "frames") if set(options.scores) - {"video_sentence"} else ()
        self.temporal = temporal_transformer(encoder, options.temporal_layers, self.frames)
        self.selector = PatchSelector(encoder.dimension, selection) if self.needs_patches else None
        head = UCoFiAHead(encoder.dimension, self.words, self.frames, options)
        self.head = head.within(self.evaluation_config.memory_gib)

    @override
    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        patches = None
        if self.selector is not None:
            if video.patches is None:
                raise UserError("UCoFiA's word_patch needs patches, but the encoder returned none")
            patches = self.selector(video.frames, video.patches)  # (M, F, P', D)
        return dataclasses.replace(super().encode_video(video), clip_frames=video.frames, patches=patches)

    @override
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        return self.head(text, video, self.temperature())
