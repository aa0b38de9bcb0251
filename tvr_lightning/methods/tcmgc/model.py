"""The equations of TC-MGC, in the paper's order (Jing, Yang, Chu, 2025).

s_i (N, D) are sentences, w_i (N, W, D) words, v_j (M, F, D) frames after the temporal encoder (Eq. 1). Vectors of all
pairs are `Pairwise`, with one slot for the sentence and one per word.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import BidirectionalAggregation, without
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.methods.checks import check_sizes
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.methods.tcmgc.options import LanguageVideoAttention, TCMGCOptions
from tvr_lightning.methods.tcmgc.reorganization import Reorganization, kept_slots, reorganize
from tvr_lightning.pairwise import Pairwise, TextConditionedAttention


@dataclass
class TCMGCText(FeatureBatch):
    """Prepared features of N texts: unit vectors, and attention queries."""

    queries: Tensor  # (N, 1 + W, D), the sentence first
    sentence: Tensor  # (N, 1, D)
    interacting_sentence: Tensor  # (N, 1, D), times the matrix G, if it exists
    words: Tensor  # (N, W, D)
    interacting_words: Tensor  # (N, W, D), times the matrix L, if it exists
    word_mask: Tensor  # (N, W) bool


class TCMGCHead(PairHead):
    """Four scores per pair and their aggregate (sections 3.2 to 3.6)."""

    def __init__(self, dimension: int, words: int, frames: int, options: TCMGCOptions) -> None:
        attention = options.attention or LanguageVideoAttention(dropout=0.0)
        # Every word has its own conditioned frame, so there are as many conditioned frames as words (Eq. 11).
        frame_slots = frames if options.attention is None else words
        super().__init__(
            dimension,
            basis=attention.heads * frames,
            slots=1 + words,
            dropout=attention.dropout,
            extra=2 * words * frame_slots,
        )
        self.options = options
        self.words = words
        self.frames = frames
        self.frame_slots = frame_slots
        self.attention: TextConditionedAttention | None = None
        if options.attention is not None:
            # The released model's `init_weights` overwrites the identity initialization of module_xpool.py.
            # https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/modeling_tcmgc.py#L185
            self.attention = TextConditionedAttention(
                dimension,
                attention.heads,
                attention.dropout,
                attention.projections,
                attention.residual,
                initialization="normal",
            )
        self._build_contrasts()
        self.lsa = LinearSoftmaxAggregation(len(options.contrasts)) if options.aggregation == "lsa" else None

    def _build_contrasts(self) -> None:
        """Build the matrices of the contrasts in use. Others would never get a gradient."""
        options = self.options
        aggregation = options.similarity_aggregation
        contrasts = options.contrasts
        matrices = options.interaction_matrices
        self._kept: dict[str, int] = {}

        def slots(name: str, count: int) -> int:
            mode: Reorganization = getattr(options.reorganization, name)
            self._kept[name] = kept_slots(count, options.keep_rate, mode, name)
            return self._kept[name] + (mode == "fusion")

        self.global_matrix = self.local_matrix = None
        if "video_sentence" in contrasts and matrices:
            self.global_matrix = nn.Parameter(torch.eye(self.dimension))
        if "video_word" in contrasts:
            self.video_word_aggregation = aggregation.module(slots("video_word", self.words))
        if "sentence_frame" in contrasts:
            self.sentence_frame_aggregation = aggregation.module(slots("sentence_frame", self.frame_slots))
        if "frame_word" in contrasts:
            self.local_matrix = nn.Parameter(torch.eye(self.dimension)) if matrices else None
            words, frames = slots("words", self.words), slots("frames", self.frame_slots)
            self.frame_word_aggregation = BidirectionalAggregation(aggregation, frames, words)

    @override
    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[TCMGCText, VideoFeatures]:
        check_sizes(text, video, self.words, self.frames)
        sentence, words = unit(text.sentence.unsqueeze(1)), unit(text.words)
        queries = torch.cat([text.sentence.unsqueeze(1), text.words], dim=1)
        queries = queries if self.attention is None else self.attention.queries(queries)  # Eqs. 2, 8
        by_global = sentence if self.global_matrix is None else sentence @ self.global_matrix
        by_local = words if self.local_matrix is None else words @ self.local_matrix
        return TCMGCText(queries, sentence, by_global, words, by_local, text.word_mask.bool()), video

    @override
    def score(self, text: TCMGCText, video: VideoFeatures, scale: Tensor) -> Scores:
        coarse, fine = self.visual_vectors(text, video)
        contrasts = self.options.contrasts
        parts = {}
        no_word, no_frame = self.padding(text, video)
        whole = no_word is None and no_frame is None

        def reorganized(similarity: Tensor, name: str, dim: int) -> Tensor:  # section 3.4
            mode: Reorganization = getattr(self.options.reorganization, name)
            return reorganize(similarity, self._kept[name], mode, dim, whole)

        of_videos = {"video_sentence": text.interacting_sentence, "video_word": text.words}
        of_frames = {"sentence_frame": text.sentence, "frame_word": text.interacting_words}
        met: dict[str, Tensor] = {}  # similarities (M, N, words, frame slots)
        for vectors, met_by in ((coarse, of_videos), (fine, of_frames)):
            chosen = {name: each for name, each in met_by.items() if name in contrasts}
            if chosen:
                met.update(zip(chosen, vectors.dots(*chosen.values()), strict=True))
        if "video_sentence" in contrasts:  # Eq. 12; the matrix G is the released code's
            parts["video_sentence"] = met["video_sentence"][:, :, 0, 0].T
        if "video_word" in contrasts:  # Eqs. 13, 18-19
            similarity = reorganized(without(no_word, met["video_word"]), "video_word", dim=2)  # (k, M, N, 1)
            parts["video_word"] = self.video_word_aggregation(similarity, whole=whole)[:, :, 0].T
        if "sentence_frame" in contrasts:  # Eqs. 14, 20-21
            similarity = reorganized(without(no_frame, met["sentence_frame"]), "sentence_frame", dim=3)
            parts["sentence_frame"] = self.sentence_frame_aggregation(similarity, whole=whole)[:, :, 0].T
        if "frame_word" in contrasts:  # Eqs. 15-17, 22-30; the matrix L is the released code's
            similarity = without(no_frame, without(no_word, met["frame_word"]))
            similarity = reorganized(similarity, "words", dim=2)  # (k, M, N, frame slots)
            similarity = reorganized(similarity, "frames", dim=3)  # (k, k, M, N)
            parts["frame_word"] = self.frame_word_aggregation(similarity, whole=whole).T
        if not whole:  # a text without words and a video without frames get the score 0, to keep losses finite
            parts = {name: part.masked_fill(part == -torch.inf, 0.0) for name, part in parts.items()}
        return Scores(self.aggregate(torch.stack(list(parts.values())), scale), parts)

    def visual_vectors(self, text: TCMGCText, video: VideoFeatures) -> tuple[Pairwise, Pairwise]:
        """Return unit video vectors z^c (one slot) and frame vectors z^f (a slot per word) of all pairs (Eqs. 2-11)."""
        if self.attention is None:
            if video.clip_frames is None:
                raise UserError("without attention, TC-MGC contrasts CLIP's own frames, but clip_frames is missing")
            pooled = unit(masked_mean(unit(video.frames), video.frame_mask))
            return self.of_videos(pooled, len(text)), self.of_videos(unit(video.clip_frames), len(text))
        # The released code computes everything twice, with the same result except for dropout.
        # https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/modeling_tcmgc.py#L284-L297
        # The frame mask and W_Q, W_K, W_V and W_O are commented out there.
        # https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/module_xpool.py#L36-L74
        frame_mask = video.frame_mask if self.options.mask_frames else None
        conditioned = self.attention(text.queries, video.frames, frame_mask, self.form).unit()
        return conditioned.divided(1)

    def padding(self, text: TCMGCText, video: VideoFeatures) -> tuple[Tensor | None, Tensor | None]:
        """Return masks of the padded words and frame slots of similarities (M, N, words, frame slots).

        None treats all slots as valid, as released. A conditioned frame belongs to a word.
        """
        no_word = ~text.word_mask[None] if self.options.mask_words else None
        if self.attention is None:
            no_frame = ~video.frame_mask.bool()[:, None, None, :] if self.options.mask_frames else None
        else:
            no_frame = None if no_word is None else no_word[:, :, None]
        return None if no_word is None else no_word[..., None], no_frame

    def aggregate(self, scores: Tensor, scale: Tensor) -> Tensor:
        """Return the weighted sum (N, M) of the contrasts' cosines (G, N, M) (Eqs. 31-32, Figs. 7-8)."""
        if self.options.aggregation == "mean":
            return scores.mean(0)
        weighed = scores * scale if self.options.aggregation_on == "logits" else scores
        weights = weighed.softmax(0) if self.lsa is None else self.lsa(weighed)
        return (weights * scores).sum(0)

    def decorrelation(self, scores: Scores, scale: Tensor) -> Tensor:
        """Return the unweighted regularization (Eq. 36) of B matching pairs, a scalar."""
        options = self.options.decorrelation
        stacked = torch.stack(list(scores.parts.values()))
        stacked = stacked * scale if options.scores == "logits" else stacked
        return similarity_decorrelation(stacked, options.pairs, options.unbiased)


class LinearSoftmaxAggregation(nn.Module):
    """LSA: weights of scores of G granularities from a softmax over a linear map of them (Eqs. 31-32).

    The released code uses the matrix (G, G) without defining it. The paper initializes it as the identity.
    https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/modeling_tcmgc.py#L426
    """

    def __init__(self, scores: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(scores))

    def forward(self, scores: Tensor) -> Tensor:
        """Return weights (G, N, M) that add up to 1 over the G scores (G, N, M) of every pair."""
        return torch.einsum("gnm,gh->hnm", scores, self.weight.to(scores.dtype)).softmax(0)


def similarity_decorrelation(
    scores: Tensor, pairs: Literal["positives", "negatives", "all"] = "positives", unbiased: bool = True
) -> Tensor:
    """Return the mean variance over G granularities of the scores (G, B, B) of some pairs (Eq. 36, Table A.1)."""
    variance = scores.var(0, correction=int(unbiased))
    if pairs == "all":
        return variance.mean()
    if pairs == "positives":
        return variance.diagonal().mean()
    size = len(variance)
    return variance.flatten()[1:].view(size - 1, size + 1)[:, :-1].mean()  # entries between consecutive diagonal ones
