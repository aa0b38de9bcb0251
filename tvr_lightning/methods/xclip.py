"""X-CLIP: End-to-End Multi-grained Contrastive Learning for Video-Text Retrieval (Ma et al., ACM MM 2022).

Four contrasts (video-sentence, video-word, sentence-frame, frame-word) and the attention over their similarity vectors
and matrices (AOSM), on CLIP's features. Follows the released code (xuguohai/X-CLIP, modules/modeling_xclip.py).

Deviations:
- padding: released includes padded words and frames in the fine-grained contrasts; here as released (`mask_words` and
  `mask_frames` leave them out).
- memory: released computes all frame-word similarities (N, W, M, F) of an evaluation at once; here block by block.
- ties, gradient of the gather, precision: released as CLIP4Clip; here as CLIP4Clip here.
- selection: released selects the best R@1 on the validation split, which on MSR-VTT is the test split; here uses the
  weights of the last step; `results.select_on: val` selects as released, on MSR-VTT
  `recipes/variants/select-on-test.yaml`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import Aggregation, BidirectionalAggregation, SoftmaxAggregation, without
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import MeanP, SeqTransf, TemporalHeader
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.checks import check_sizes, distinct
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.option_types import Options, variant
from tvr_lightning.pairwise import mapped_between, token_similarities

XCLIPContrast = Literal["video_sentence", "video_word", "sentence_frame", "frame_word"]


class AOSM(SoftmaxAggregation):
    """Attention over similarities x: sum_s x_s (softmax(lambda x) A)_s.

    As released, the learned matrix A is applied after the softmax, so that weights can be negative and need not add up
    to one.

    Args:
        softmax_lambda: factor inside the softmax (released: divided by 0.01).
    """

    learned = True


@dataclass
class XCLIPOptions(Options):
    """Options of X-CLIP.

    Attributes:
        similarity_header: relation of the frames before they are pooled to the video (released: --sim_header), by
            default `SeqTransf`; frame contrasts always use CLIP's own frames.
        contrasts: contrasts to average, out of the four.
        similarity_aggregation: aggregation of similarities: `AOSM` by default, `SoftmaxAggregation`, or
            `MeanAggregation`.
        mask_words: leave padded words out; the released code keeps them.
        mask_frames: leave padded frames out of the frame contrasts; the released code keeps them.
    """

    similarity_header: TemporalHeader = variant(SeqTransf)
    contrasts: tuple[XCLIPContrast, ...] = get_args(XCLIPContrast)
    similarity_aggregation: Aggregation = variant(AOSM)
    mask_words: bool = False
    mask_frames: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.contrasts = distinct("contrasts", self.contrasts, XCLIPContrast)
        used = set(self.contrasts)
        listed = ", ".join(self.contrasts)
        if used == {"video_sentence"} and self.similarity_aggregation != AOSM():
            raise UserError(
                "video_sentence alone has nothing to aggregate. Leave similarity_aggregation at its default."
            )
        if self.mask_words and not used & {"video_word", "frame_word"}:
            raise UserError(f"mask_words: none of the contrasts {listed} has words to mask")
        if self.mask_frames and not used & {"sentence_frame", "frame_word"}:
            raise UserError(f"mask_frames: none of the contrasts {listed} has frames to mask")
        if not isinstance(self.similarity_header, MeanP) and not used & {"video_sentence", "video_word"}:
            raise UserError(
                f"The contrasts {listed} use CLIP's frames, so nothing would use the temporal encoder. Set "
                "similarity_header to MeanP."
            )


@dataclass
class XCLIPText(FeatureBatch):
    """Prepared features of N texts: unit vectors, and those of the interacting contrasts, if they are used."""

    sentence: Tensor  # (N, 1, D)
    interacting_sentence: Tensor | None  # (N, D), times the matrix G
    words: Tensor  # (N, W, D)
    interacting_words: Tensor | None  # (N, W, D); the words or the frames are multiplied by the matrix L
    word_mask: Tensor  # (N, W) bool


@dataclass
class XCLIPVideo(FeatureBatch):
    """Prepared features of M videos: unit vectors, and those of the frame-word contrast, if it is used."""

    pooled: Tensor  # (M, D)
    frames: Tensor  # (M, F, D) of CLIP
    interacting_frames: Tensor | None  # (M, F, D), times the temperature of their aggregation
    frame_mask: Tensor  # (M, F) bool


class XCLIPHead(PairHead):
    """Scores (N, M) of up to four contrasts and their mean."""

    def __init__(self, dimension: int, words: int, frames: int, options: XCLIPOptions) -> None:
        contrasts = options.contrasts
        aggregation = options.similarity_aggregation
        # The similarities themselves, their softmax in either direction, and the products with both.
        cells = words * frames if "frame_word" in contrasts else words + frames
        super().__init__(dimension, extra=6 * cells, side="both")
        self.options = options
        self.words = words
        self.frames = frames
        # Matrices of unused contrasts would never get a gradient.
        if "video_sentence" in contrasts:
            self.global_matrix = nn.Parameter(torch.eye(dimension))
        if "video_word" in contrasts:
            self.video_word = aggregation.module(words)
        if "sentence_frame" in contrasts:
            self.sentence_frame = aggregation.module(frames)
        if "frame_word" in contrasts:
            self.local_matrix = nn.Parameter(torch.eye(dimension))
            self.frame_word = BidirectionalAggregation(aggregation, frames, words)

    @override
    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[XCLIPText, XCLIPVideo]:
        check_sizes(text, video, self.words, self.frames)
        pooled = unit(masked_mean(unit(video.frames), video.frame_mask))
        contrasts = self.options.contrasts
        sentence = unit(text.sentence)
        words = unit(text.words)
        by_global = sentence @ self.global_matrix if "video_sentence" in contrasts else None
        frames = unit(video.frames if video.clip_frames is None else video.clip_frames)
        met_frames = met_words = None
        if "frame_word" in contrasts:  # (w L) . f
            met_frames, met_words = mapped_between(frames, words, self.local_matrix)
            met_frames = self.frame_word.temperature * met_frames
        texts = XCLIPText(sentence.unsqueeze(1), by_global, words, met_words, text.word_mask.bool())
        return texts, XCLIPVideo(pooled, frames, met_frames, video.frame_mask.bool())

    @override
    def score(self, text: XCLIPText, video: XCLIPVideo, *given: Any) -> Scores:
        options = self.options
        parts = {}
        no_word = ~text.word_mask.T if options.mask_words else None  # (W, n)
        no_frame = ~video.frame_mask.T.unsqueeze(-1) if options.mask_frames else None  # (F, m, 1)
        whole = no_word is None and no_frame is None
        if text.interacting_sentence is not None:
            parts["video_sentence"] = text.interacting_sentence @ video.pooled.T
        if "video_word" in options.contrasts:
            similarity = token_similarities(video.pooled.unsqueeze(1), text.words).squeeze(0)  # (m, W, n)
            parts["video_word"] = self.video_word(without(no_word, similarity), 1, no_word is None).T
        if "sentence_frame" in options.contrasts:
            similarity = token_similarities(video.frames, text.sentence).squeeze(2)  # (F, m, n)
            parts["sentence_frame"] = self.sentence_frame(without(no_frame, similarity), 0, no_frame is None).T
        if text.interacting_words is not None and video.interacting_frames is not None:
            similarity = token_similarities(video.interacting_frames, text.interacting_words)  # (F, m, W, n)
            similarity = without(None if no_frame is None else no_frame.unsqueeze(-1), without(no_word, similarity))
            parts["frame_word"] = self.frame_word(similarity, words=2, whole=whole, scaled=True).T
        # A video without frames gets the score 0, to keep losses finite.
        if not whole:
            parts = {name: part.masked_fill(part == -torch.inf, 0.0) for name, part in parts.items()}
        return Scores(torch.stack(list(parts.values())).mean(0), parts)


class XCLIP(RetrievalModule):
    """X-CLIP with its four contrasts.

    Args:
        encoder: encoder of texts and videos.
        xclip: options of X-CLIP.
    """

    def __init__(self, encoder: Encoder, *, xclip: XCLIPOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = xclip or XCLIPOptions()
        masked = {"words": options.mask_words, "frames": options.mask_frames}
        self.reads_padding = tuple(name for name, left_out in masked.items() if not left_out)
        self.temporal = options.similarity_header.module(encoder, self.frames)
        head = XCLIPHead(encoder.dimension, self.words, self.frames, options)
        self.head = head.within(self.evaluation_config.memory_gib)

    @override
    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        if self.temporal is None:
            return video
        # The frame contrasts use CLIP's own frames.
        return dataclasses.replace(super().encode_video(video), clip_frames=video.frames)

    @override
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        return self.head(text, video)
