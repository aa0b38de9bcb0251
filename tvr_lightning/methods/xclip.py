"""X-CLIP: End-to-End Multi-grained Contrastive Learning for Video-Text Retrieval (Ma et al., ACM MM 2022).

Four contrasts (video-sentence, video-word, sentence-frame, frame-word) and the attention over their similarity vectors
and matrices (AOSM), on CLIP's features. Follows the released code (xuguohai/X-CLIP, modules/modeling_xclip.py).

Deviations:
- padding: released padded words and frames take part in the fine-grained contrasts; here as released (`mask_words` and
  `mask_frames` leave them out).
- memory: released makes the frame-word similarities (N, W, M, F) of an evaluation at once; here block by block.
- ties: released counts a tied query several times; here they are ranked by their expectation.
- gradient of the gather: released each device's own slice (`gather: own-slice`); here the exact one.
- precision: released CLIP in float16 with float32 masters (`encoder_precision: fp16-master`); here float32.
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
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import TemporalLSTM, temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.pairwise import score_in_blocks
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.optim import OptimizerConfig

XCLIPContrast = Literal["video_sentence", "video_word", "sentence_frame", "frame_word"]
XCLIPAggregation = Literal["attention", "softmax", "mean"]
XCLIPHeader = Literal["meanP", "seqLSTM", "seqTransf"]


class SimilarityAttention(nn.Module):
    """Attention over a vector of similarities x: sum_s x_s (softmax(x / tau) A)_s (X-CLIP, AOSM).

    The matrix comes after the softmax as released, so that weights need be neither positive nor add up to one.

    Args:
        slots: S; the matrix A is (S, S) and starts as the identity.
        temperature: tau.
        kind: `attention` as above, `softmax` without the matrix, `mean` without either.
    """

    def __init__(self, slots: int, temperature: float = 0.01, kind: XCLIPAggregation = "attention") -> None:
        super().__init__()
        self.temperature = temperature
        self.kind = kind
        self.weight = nn.Parameter(torch.eye(slots)) if kind == "attention" else None

    def forward(self, similarities: Tensor, mask: Tensor | None = None) -> Tensor:
        """Aggregate the last dimension.

        Args:
            similarities: (..., S).
            mask: broadcastable to (..., S), True for slots that take part; all where it is not given.

        Returns:
            (...); 0 where no slot takes part.
        """
        if mask is not None:
            similarities = similarities.masked_fill(~mask, 0.0)
        if self.kind == "mean":
            if mask is None:
                return similarities.mean(-1)
            return similarities.sum(-1) / mask.expand_as(similarities).sum(-1).clamp(min=1)
        logits = similarities / self.temperature
        if mask is not None:
            # Not minus infinity: a softmax over nothing must stay a number.
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        weights = logits.softmax(-1)
        if self.weight is not None:
            weights = weights @ self.weight.to(weights.dtype)
        return (similarities * weights).sum(-1)


@dataclass
class PreparedVideo(Record):
    """What the contrasts read of M videos.

    Attributes:
        pooled: (M, D) unit vectors of the videos.
        frames: (M, F, D) CLIP's own frames at unit length.
        frame_mask: (M, F) bool, True where there is a frame.
    """

    pooled: Tensor
    frames: Tensor
    frame_mask: Tensor


class XCLIPHead(nn.Module):
    """Features to the scores of up to four contrasts and their mean.

    Args:
        dimension: D.
        words: W, word slots.
        frames: F, frame slots.
        contrasts: which scores are made.
        aggregation: of similarity vectors and matrices.
        temperature: tau of the aggregation.
        mask_words: leave padded words out.
        mask_frames: leave padded frames out.
    """

    def __init__(
        self,
        dimension: int,
        words: int,
        frames: int,
        contrasts: tuple[XCLIPContrast, ...] = get_args(XCLIPContrast),
        aggregation: XCLIPAggregation = "attention",
        temperature: float = 0.01,
        mask_words: bool = False,
        mask_frames: bool = False,
    ) -> None:
        super().__init__()
        self.words, self.frames = words, frames
        self.contrasts = tuple(name for name in get_args(XCLIPContrast) if name in contrasts)
        self.mask_words, self.mask_frames = mask_words, mask_frames

        def attention(slots: int) -> SimilarityAttention:
            return SimilarityAttention(slots, temperature, aggregation)

        # Matrices of contrasts that are not made would wait for a gradient in vain.
        if "video_sentence" in contrasts:
            self.global_matrix = nn.Parameter(torch.eye(dimension))
        if "video_word" in contrasts:
            self.video_word = attention(words)
        if "sentence_frame" in contrasts:
            self.sentence_frame = attention(frames)
        if "frame_word" in contrasts:
            self.local_matrix = nn.Parameter(torch.eye(dimension))
            self.words_of_frame = attention(words)
            self.frames_after_words = attention(frames)
            self.frames_of_word = attention(frames)
            self.words_after_frames = attention(words)

    def forward(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score N texts against M videos, block by block.

        Args:
            text: sentence (N, D), words (N, W, D).
            video: `frames` (M, F, D) after the temporal encoder, `clip_frames` before it where the two differ.

        Returns:
            `similarity` (N, M), the mean of the contrasts on the scale of a cosine, and the contrasts as `parts`.

        Raises:
            ValueError: another number of words or frames than the head's matrices are for.
        """
        words, frames = text.words.shape[1], video.frames.shape[1]
        if (words, frames) != (self.words, self.frames):
            raise ValueError(
                f"X-CLIP was built for {self.words} words and {self.frames} frames, its matrices fit no others; got "
                f"{words} words and {frames} frames: set model.init_args.words and frames, or those of the data"
            )
        before = video.frames if video.clip_frames is None else video.clip_frames
        pooled = unit(masked_mean(unit(video.frames), video.frame_mask))
        prepared = PreparedVideo(pooled, unit(before), video.frame_mask.bool())
        texts = TextFeatures(unit(text.sentence), unit(text.words), text.word_mask.bool())
        # The similarities themselves, their softmax in either direction, and the products with both.
        pair_bytes = text.sentence.element_size() * 6 * (words * frames if "frame_word" in self.contrasts else 8)
        budget = 2**20 * (64 if text.sentence.device.type == "cpu" else 1024)
        return score_in_blocks(self._score_block, texts, prepared, pair_bytes, budget)

    def _score_block(self, text: TextFeatures, video: PreparedVideo) -> Scores:
        words = text.word_mask if self.mask_words else None  # (n, W)
        frames = video.frame_mask if self.mask_frames else None  # (m, F)
        parts = {}
        if "video_sentence" in self.contrasts:
            parts["video_sentence"] = text.sentence @ self.global_matrix @ video.pooled.T
        if "video_word" in self.contrasts:
            similarity = torch.einsum("nwd,md->nmw", text.words, video.pooled)
            parts["video_word"] = self.video_word(similarity, None if words is None else words[:, None])
        if "sentence_frame" in self.contrasts:
            similarity = torch.einsum("nd,mfd->nmf", text.sentence, video.frames)
            parts["sentence_frame"] = self.sentence_frame(similarity, None if frames is None else frames[None])
        if "frame_word" in self.contrasts:
            parts["frame_word"] = self._frame_word(text, video, words, frames)
        return Scores(torch.stack(list(parts.values())).mean(0), parts)

    def _frame_word(
        self, text: TextFeatures, video: PreparedVideo, words: Tensor | None, frames: Tensor | None
    ) -> Tensor:
        """Words of every frame, then frames; frames of every word, then words; the mean of both (n, m)."""
        similarity = torch.einsum("nwd,mfd->nmwf", text.words @ self.local_matrix, video.frames)
        per_frame = self.words_of_frame(similarity.transpose(2, 3), None if words is None else words[:, None, None])
        per_word = self.frames_of_word(similarity, None if frames is None else frames[None, :, None])
        word_then_frame = self.frames_after_words(per_frame, None if frames is None else frames[None])
        frame_then_word = self.words_after_frames(per_word, None if words is None else words[:, None])
        return (word_then_frame + frame_then_word) / 2


class XCLIP(RetrievalModule):
    """X-CLIP with its four contrasts.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give.
        contrast: what else the contrastive loss does with logits.
        similarity_header: `seqTransf` (released) and `seqLSTM` relate the frames over time before they are pooled to
            the video; `meanP` pools CLIP's frames. Frame contrasts always take CLIP's own frames.
        temporal_layers: blocks of seqTransf (released: 4) or layers of seqLSTM (released: 1).
        contrasts: which of the four contrasts are averaged.
        aggregation: `attention` over similarities (AOSM), its `softmax` without the learnt matrices, or the `mean`.
        softmax_temperature: tau (released: 0.01).
        mask_words: leave padded words out; the released code keeps them.
        mask_frames: leave padded frames out of the frame contrasts; the released code keeps them.

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
        similarity_header: XCLIPHeader = "seqTransf",
        temporal_layers: int | None = None,
        contrasts: tuple[XCLIPContrast, ...] = get_args(XCLIPContrast),
        aggregation: XCLIPAggregation = "attention",
        softmax_temperature: float = 0.01,
        mask_words: bool = False,
        mask_frames: bool = False,
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather, contrast)
        self.reads_padding = (*(() if mask_words else ("words",)), *(() if mask_frames else ("frames",)))
        contrasts = tuple(contrasts)
        self._check(similarity_header, temporal_layers, contrasts, aggregation, softmax_temperature)
        fine = set(contrasts) - {"video_sentence"}
        if not fine and (aggregation != "attention" or softmax_temperature != 0.01):
            raise ValueError("video_sentence alone aggregates nothing: leave aggregation and softmax_temperature alone")
        if mask_words and not {"video_word", "frame_word"} & fine:
            raise ValueError(f"mask_words: none of the contrasts {list(contrasts)} has words to mask")
        if mask_frames and not {"sentence_frame", "frame_word"} & fine:
            raise ValueError(f"mask_frames: none of the contrasts {list(contrasts)} has frames to mask")
        self.temporal: nn.Module | None = None
        if similarity_header == "seqTransf":
            self.temporal = temporal_transformer(encoder, temporal_layers or 4, frames)
        elif similarity_header == "seqLSTM":
            self.temporal = TemporalLSTM(encoder.dimension, layers=temporal_layers or 1)
        self.head = XCLIPHead(
            encoder.dimension, words, frames, contrasts, aggregation, softmax_temperature, mask_words, mask_frames
        )

    @staticmethod
    def _check(
        header: XCLIPHeader,
        temporal_layers: int | None,
        contrasts: tuple[XCLIPContrast, ...],
        aggregation: XCLIPAggregation,
        softmax_temperature: float,
    ) -> None:
        known = get_args(XCLIPContrast)
        if not contrasts or len(set(contrasts)) < len(contrasts) or set(contrasts) - set(known):
            raise ValueError(f"contrasts is {list(contrasts)}; name some of {', '.join(known)}, each once")
        for name, value, choices in (
            ("similarity_header", header, get_args(XCLIPHeader)),
            ("aggregation", aggregation, get_args(XCLIPAggregation)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
        if softmax_temperature <= 0:
            raise ValueError(f"softmax_temperature is {softmax_temperature}; it must be above 0")
        if aggregation == "mean" and softmax_temperature != 0.01:
            raise ValueError("aggregation: mean has no softmax; drop softmax_temperature")
        if header == "meanP" and temporal_layers is not None:
            raise ValueError("similarity_header: meanP has no temporal layers; drop temporal_layers or use seqTransf")
        if temporal_layers is not None and temporal_layers < 1:
            raise ValueError(f"temporal_layers is {temporal_layers}; expected at least 1, or similarity_header: meanP")
        if header != "meanP" and not {"video_sentence", "video_word"} & set(contrasts):
            raise ValueError(
                f"the contrasts {', '.join(contrasts)} take CLIP's own frames and nothing would use the temporal "
                "encoder: set similarity_header to meanP"
            )

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Relate the frames (M, F, D) over time, keeping CLIP's own as `clip_frames` for the frame contrasts."""
        if self.temporal is None:
            return video
        related = self.temporal(video.frames, video.frame_mask)
        return dataclasses.replace(video, frames=related, clip_frames=video.frames)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos.

        Returns:
            `similarity` (N, M): the mean of the contrasts on the scale of a cosine; `parts`: the contrasts.
        """
        return self.head(text, video)
