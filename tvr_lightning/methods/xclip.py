"""X-CLIP: End-to-End Multi-grained Contrastive Learning for Video-Text Retrieval (Ma et al., ACM MM 2022).

Four contrasts (video-sentence, video-word, sentence-frame, frame-word) and the attention over their similarity vectors
and matrices (AOSM), on CLIP's features. Follows the released code (xuguohai/X-CLIP, modules/modeling_xclip.py).

Deviations:
- padding: released includes padded words and frames in the fine-grained contrasts; here as released (`mask_words` and
  `mask_frames` leave them out).
- memory: released computes all frame-word similarities (N, W, M, F) of an evaluation at once; here block by block.
- ties: released counts a tied query several times; here ranks ties by their expected rank.
- gradient of the gather: released uses each device's own slice (`gather: own-slice`); here the exact gradient.
- precision: released trains CLIP's matrices as float16 parameters with float16 moments, so that a rate of 1e-7 moves
  CLIP about 40 times as far as in float32 (benchmarks/results/precision.md); here as released
  (`encoder_precision: float16`), and `recipes/variants/float32.yaml` for bf16 and FSDP.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import Aggregation, BidirectionalAggregation, mapped_slots, summed
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import MeanP, SeqTransf, TemporalHeader
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.option_types import Options, Positive, variant
from tvr_lightning.pairwise import mapped_between, token_similarities

XCLIPContrast = Literal["video_sentence", "video_word", "sentence_frame", "frame_word"]


class SimilarityAttention(nn.Module):
    """Attention over a vector of similarities x: sum_s x_s (softmax(lambda x) A)_s (X-CLIP, AOSM).

    As released, the matrix is applied after the softmax, so weights can be negative and need not add up to one.

    Args:
        slots: Number of slots S. The matrix A (S, S) is initialized as the identity.
        temperature: Factor lambda inside the softmax.
    """

    def __init__(self, slots: int, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.weight = nn.Parameter(torch.eye(slots))

    def forward(self, similarities: Tensor, dim: int = 0, whole: bool = False, scaled: bool = False) -> Tensor:
        """Return the sum (...) of similarities (S, ...), or minus infinity if all slots are absent.

        Args:
            similarities: Similarities (S, ...), or with the slots at `dim`.
            dim: Axis of the slots.
            whole: Whether all slots are known to be present.
            scaled: Whether the similarities are multiplied by lambda. The result is not.
        """
        absent = None if whole else similarities == -torch.inf
        logits = similarities if scaled else self.temperature * similarities
        if absent is None or not bool(absent.any()):
            total = summed(self._weights(logits, dim), similarities, dim)
            return total / self.temperature if scaled else total
        logits = logits.masked_fill(absent, torch.finfo(similarities.dtype).min)
        total = (self._weights(logits, dim) * similarities.masked_fill(absent, 0.0)).sum(dim)
        total = total / self.temperature if scaled else total
        return total.masked_fill(absent.all(dim), -torch.inf)

    def _weights(self, logits: Tensor, dim: int) -> Tensor:
        weights = logits.softmax(dim)
        return mapped_slots(self.weight.to(weights.dtype).T, weights, dim)


class AOSM(Aggregation):
    """Attention over similarities: one softmax followed by a learned matrix.

    Args:
        softmax_lambda: factor inside the softmax (released: divided by 0.01).
    """

    def __init__(self, softmax_lambda: Positive = 100.0) -> None:
        self.softmax_lambda = softmax_lambda

    def module(self, slots: int) -> nn.Module:
        """Return the module that sums similarities over S `slots`."""
        return SimilarityAttention(slots, self.softmax_lambda)


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

    Raises:
        UserError: A value is out of range, or an option belongs to contrasts that are not computed.
    """

    similarity_header: TemporalHeader = variant(SeqTransf)
    contrasts: tuple[XCLIPContrast, ...] = get_args(XCLIPContrast)
    similarity_aggregation: Aggregation = variant(AOSM)
    mask_words: bool = False
    mask_frames: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        known = get_args(XCLIPContrast)
        if not self.contrasts or len(set(self.contrasts)) < len(self.contrasts):
            raise UserError(
                f"contrasts is {list(self.contrasts)}; it must contain some of {', '.join(known)}, each once"
            )
        made = set(self.contrasts)
        self.contrasts = tuple(name for name in known if name in made)
        if made == {"video_sentence"} and self.similarity_aggregation != AOSM():
            raise UserError(
                "video_sentence alone has nothing to aggregate. Leave similarity_aggregation at its default."
            )
        if self.mask_words and not made & {"video_word", "frame_word"}:
            raise UserError(f"mask_words: none of the contrasts {list(self.contrasts)} has words to mask")
        if self.mask_frames and not made & {"sentence_frame", "frame_word"}:
            raise UserError(f"mask_frames: none of the contrasts {list(self.contrasts)} has frames to mask")
        if not isinstance(self.similarity_header, MeanP) and not made & {"video_sentence", "video_word"}:
            raise UserError(
                f"The contrasts {', '.join(self.contrasts)} use CLIP's frames, so nothing would use the temporal "
                "encoder. Set similarity_header to MeanP."
            )


@dataclass
class XCLIPText(FeatureBatch):
    """Prepared features of N texts.

    Attributes:
        sentence: Unit sentences (N, 1, D).
        interacting_sentence: Unit sentences (N, D) times the matrix G, if it exists.
        words: Unit words (N, W, D).
        interacting_words: Words of the frame-word contrast, if it is used.
        word_mask: Mask (N, W) bool, True for valid tokens.
    """

    sentence: Tensor
    interacting_sentence: Tensor | None
    words: Tensor
    interacting_words: Tensor | None
    word_mask: Tensor


@dataclass
class XCLIPVideo(FeatureBatch):
    """Prepared features of M videos.

    Attributes:
        pooled: Unit vectors (M, D) of the videos.
        frames: Unit vectors (M, F, D) of CLIP's frames.
        interacting_frames: Frames (M, F, D) of the frame-word contrast, if it is used, times the temperature of its
            aggregation. The tokens of one side are multiplied by L.
        frame_mask: Mask (M, F) bool, True for valid frames.
    """

    pooled: Tensor
    frames: Tensor
    interacting_frames: Tensor | None
    frame_mask: Tensor


class XCLIPHead(PairHead):
    """Scores (N, M) of up to four contrasts and their mean.

    Args:
        dimension: Dimension D of the features.
        words: Number of word slots W.
        frames: Number of frame slots F.
        options: Options of X-CLIP.
    """

    def __init__(self, dimension: int, words: int, frames: int, options: XCLIPOptions | None = None) -> None:
        options = options or XCLIPOptions()
        contrasts, aggregation = options.contrasts, options.similarity_aggregation
        # The similarities themselves, their softmax in either direction, and the products with both.
        cells = words * frames if "frame_word" in contrasts else words + frames
        super().__init__(dimension, extra=6 * cells, side="both")
        self.options, self.words, self.frames = options, words, frames
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

    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[XCLIPText, XCLIPVideo]:
        """Return the prepared features of the texts and of the videos.

        Args:
            text: Sentences (N, D) and words (N, W, D).
            video: `frames` (M, F, D) after the temporal encoder, and `clip_frames` before it if they differ.

        Raises:
            UserError: The number of words or frames differs from the shape of the head's matrices.
        """
        found = (text.words.shape[1], video.frames.shape[1])
        if found != (self.words, self.frames):
            raise UserError(
                f"X-CLIP was built for {self.words} words and {self.frames} frames, but got {found[0]} words and "
                f"{found[1]} frames. Set model.init_args.words and frames, or those of the data."
            )
        before = video.frames if video.clip_frames is None else video.clip_frames
        pooled = unit(masked_mean(unit(video.frames), video.frame_mask))
        contrasts, sentence, words = self.options.contrasts, unit(text.sentence), unit(text.words)
        by_global = sentence @ self.global_matrix if "video_sentence" in contrasts else None
        frames, met_words, met_frames = unit(before), None, None
        if "frame_word" in contrasts:  # (w L) . f
            met_frames, met_words = mapped_between(frames, words, self.local_matrix)
            met_frames = self.frame_word.temperature * met_frames
        texts = XCLIPText(sentence.unsqueeze(1), by_global, words, met_words, text.word_mask.bool())
        return texts, XCLIPVideo(pooled, frames, met_frames, video.frame_mask.bool())

    def score(self, text: XCLIPText, video: XCLIPVideo) -> Scores:
        """Return the mean (n, m) of the contrasts on the scale of a cosine, and the contrasts as `parts`."""
        options, parts = self.options, {}
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


def without(absent: Tensor | None, similarity: Tensor) -> Tensor:
    """Set similarities (S, ...) of `absent` slots (broadcast) to minus infinity. None means no slot."""
    return similarity if absent is None else similarity.masked_fill(absent, -torch.inf)


class XCLIP(RetrievalModule):
    """X-CLIP with its four contrasts.

    Args:
        encoder: encoder of texts and videos.
        xclip: options of X-CLIP.
        shared: arguments of `RetrievalModule`.
    """

    def __init__(self, encoder: Encoder, *, xclip: XCLIPOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = xclip or XCLIPOptions()
        masked = {"words": options.mask_words, "frames": options.mask_frames}
        self.reads_padding = tuple(name for name, left_out in masked.items() if not left_out)
        self.temporal = options.similarity_header.module(encoder, self.frames)
        self.head = XCLIPHead(encoder.dimension, self.words, self.frames, options).within(
            self.evaluation_config.memory_gib
        )

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Relate the frames (M, F, D) over time, and keep CLIP's own as `clip_frames` for the frame contrasts."""
        if self.temporal is None:
            return video
        related = self.temporal(video.frames, video.frame_mask)
        return dataclasses.replace(video, frames=related, clip_frames=video.frames)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Return the mean cosines (N, M) of the contrasts, and the contrasts as `parts`."""
        return self.head(text, video)
