"""The equations of DPDV, in the paper's order (anonymous ACL submission).

T_s (N, D) are sentences, T_w (N, W, D) words, V_f (M, F, D) frames, and V_p (M, F, P, D) their patches, merged by
`patch_merging.py` (Eqs. 7-8). `interactions.py` has Eqs. 1, 5, 6 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.patch_selector import first_largest
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.methods.dpdv.interactions import (
    Interaction,
    MeanInteraction,
    SimilarityAggregation,
    WeightedMax,
    WeightedTokens,
)
from tvr_lightning.methods.dpdv.options import Divergence, DPDVOptions
from tvr_lightning.methods.pair_head import PairHead

FrameSet = Literal["all", "spot", "recover"]


@dataclass
class Captions(FeatureBatch):
    """Features of up to S descriptions of each of B videos."""

    sentence: Tensor  # (B, S, D)
    words: Tensor  # (B, S, W, D)
    word_mask: Tensor  # (B, S, W) bool
    mask: Tensor  # (B, S) bool, True for valid descriptions

    @classmethod
    def of(cls, features: TextFeatures, mask: Tensor) -> Captions:
        """Return the features of B S texts as the captions of B videos, which are valid in a mask (B, S)."""
        sentence, words, word_mask = (
            part.unflatten(0, mask.shape) for part in (features.sentence, features.words, features.word_mask)
        )
        return cls(sentence, words, word_mask, mask)


# Dual-Pathway Partitioning Module (section 3.2)


@torch.no_grad()
def spot_frames(similarity: Tensor, frame_mask: Tensor, ratio: float) -> Tensor:
    """Return a mask (..., F) of the Spot-Path's frames V_f^+: the share `ratio` most similar to the sentence (Eq. 3).

    The number is rounded up, but of two or more frames at least one is left. Of equal frames, the earlier is selected.
    """
    valid = frame_mask.sum(-1, keepdim=True)
    # 1e-6 corrects the binary rounding of thirds and tenths.
    kept = torch.ceil(valid * ratio - 1e-6).long().clamp(min=1)
    kept = torch.minimum(kept, (valid - 1).clamp(min=1))
    order = first_largest(similarity.masked_fill(~frame_mask, -torch.inf), similarity.shape[-1])
    place = order.argsort(dim=-1)
    return (place < kept) & frame_mask


def recover_frames(spot: Tensor, frame_mask: Tensor) -> Tensor:
    """Return a mask (..., F) of the frames of the Recover-Path, V_f^-: all other frames, or the single frame."""
    rest = frame_mask & ~spot
    return torch.where(rest.any(-1, keepdim=True), rest, frame_mask)


@torch.no_grad()
def caption_order(captions: Tensor, mask: Tensor, frames: Tensor, recover: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines (B, S) of captions with the mean of the Recover-Path's frames, and their order (Eq. 4)."""
    cosine = torch.einsum("bsd,bd->bs", unit(captions), unit(masked_mean(frames, recover)))
    return cosine, first_largest(cosine.masked_fill(~mask, -torch.inf), captions.shape[1])


# Dual-View Interaction Module (section 3.3)


@dataclass
class TextSide(FeatureBatch):
    """Texts of a path: by view, sentences (or captions) for `macro` and words for `micro`, and unit sentences."""

    tokens: dict[str, WeightedTokens]
    query: Tensor  # (N, D), divides frames


@dataclass
class VideoSide(FeatureBatch):
    """Videos of a path: by view, frames for `macro` and patches for `micro`, and unit frames."""

    tokens: dict[str, WeightedTokens]
    frames: Tensor  # (M, F, D), divided by a text
    frame_mask: Tensor  # (M, F) bool


class DPDVHead(PairHead):
    """Scores of the original pairs in both views, and of matching pairs in both paths (sections 3.2 and 3.3).

    UCoFiA's aggregation fixes the numbers of words and frames.
    """

    def __init__(self, dimension: int, words: int, frames: int, options: DPDVOptions) -> None:
        super().__init__(dimension)
        self.options = options
        self.macro = self.micro = None
        if "macro" in options.views:  # Eqs. 5 and 6
            # A single sentence has the weight 1.
            several = options.recover_captions > 1
            simplified = options.macro_interaction == "weighted-sum"
            weighted = WeightedMax(dimension, several, simplified)
            self.macro = interaction(options.macro_interaction, weighted, (1, frames))
        if "micro" in options.views:  # Eq. 9
            patches = frames * (options.patch_reduction.per_frame or 1)
            self.micro = interaction(options.micro_interaction, WeightedMax(dimension), (words, patches))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):  # HBI's initialization
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    @property
    def views(self) -> dict[str, Interaction]:
        """Interactions of the views in use."""
        return {name: module for name, module in (("macro", self.macro), ("micro", self.micro)) if module is not None}

    @override
    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[TextSide, VideoSide]:
        return self.of_text(text), self.of_video(video)

    def of_text(self, text: TextFeatures) -> TextSide:
        """Return the tokens of N texts: T_s for the macro view, T_w for the micro view."""
        sentence = text.sentence.unsqueeze(1)
        one = torch.ones(sentence.shape[:2], dtype=torch.bool, device=sentence.device)
        return self._text_side(text, macro=(sentence, one), micro=(text.words, text.word_mask))

    def of_captions(self, text: TextFeatures, captions: Captions, video: VideoFeatures, recover: Tensor) -> TextSide:
        """Return the tokens of the N_s^- captions most similar to the Recover-Path's frames (B, F) (Eq. 4).

        Several captions form one set of sentences and one set of words (Supplement, Eqs. 2 and 3).
        """
        _, order = caption_order(captions.sentence, captions.mask, video.frames, recover)
        rows = torch.arange(len(order), device=order.device).unsqueeze(1)
        chosen = captions.apply(lambda each: each[rows, order[:, : self.options.recover_captions]])
        word_mask = chosen.word_mask & chosen.mask.unsqueeze(-1)
        words = chosen.words.flatten(1, 2), word_mask.flatten(1, 2)
        return self._text_side(text, macro=(chosen.sentence, chosen.mask), micro=words)

    def chosen_captions(self, text: TextFeatures, video: VideoFeatures, captions: Captions) -> Tensor:
        """Return the positions (B, N_s^-) of the captions that `of_captions` uses for B matching pairs."""
        text, video, captions = text.float(), video.float(), captions.float()
        with torch.autocast(text.sentence.device.type, enabled=False):
            _, recover = self.partition(text, video)
            _, order = caption_order(captions.sentence, captions.mask, video.frames, recover)
        return order[:, : self.options.recover_captions]

    def _text_side(self, text: TextFeatures, **given: tuple[Tensor, Tensor]) -> TextSide:
        """Return N texts that divide frames, with tokens (N, T, D) and masks (N, T) by view."""
        return TextSide(
            {view: module.prepared("text", *given[view]) for view, module in self.views.items()}, unit(text.sentence)
        )

    def of_video(self, video: VideoFeatures, mask: Tensor | None = None) -> VideoSide:
        """Return the tokens of M videos in a mask (M, F) of frames, by default all valid ones: V_f and V_p by view."""
        mask = (video.frame_mask if mask is None else mask).bool()
        tokens = {}
        if self.macro is not None:
            tokens["macro"] = self.macro.prepared("video", video.frames, mask)
        if self.micro is not None:
            if video.patches is None:
                raise UserError("DPDV's micro view needs patches. Set views to [macro] to score without them.")
            per_frame = mask.repeat_interleave(video.patches.shape[2], dim=1)
            tokens["micro"] = self.micro.prepared("video", video.patches.flatten(1, 2), per_frame)
        return VideoSide(tokens, unit(video.frames), mask)

    @override
    def score(self, text: TextSide, video: VideoSide, part: FrameSet = "all") -> Scores:
        # The mean over the views of S_macro (Eqs. 5-6) and S_micro (Eq. 9), from `all` frames of a video, or from the
        # frames that each text selects for the `spot` or the `recover` path.
        chosen = None if part == "all" else self.pair_frames(text, video, part)
        parts = {}
        for view, module in self.views.items():
            some, few = text.tokens[view], video.tokens[view]
            per_frame = few.mask.shape[1] // video.frames.shape[1]
            mask = None if chosen is None else chosen.repeat_interleave(per_frame, dim=2)
            parts[view] = module(some, few, mask)
        return Scores(torch.stack(list(parts.values())).mean(0), parts)

    def pair_frames(self, text: TextSide, video: VideoSide, part: FrameSet) -> Tensor:
        """Return a mask (n, m, F) of a path's frames of each pair, if every text divides every video (Eq. 3)."""
        similarity = torch.einsum("nd,mfd->nmf", text.query, video.frames)
        mask = video.frame_mask.expand_as(similarity)
        spot = spot_frames(similarity, mask, self.options.spot_ratio)
        return spot if part == "spot" else recover_frames(spot, mask)

    @override
    def pair_numbers(self, text: TextSide, video: VideoSide) -> int:
        numbers = 2 * video.frames.shape[1]  # frame masks
        for view, module in self.views.items():
            numbers += module.pair_numbers(text.tokens[view].mask.shape[1], video.tokens[view].mask.shape[1])
        return numbers

    @override
    def order(self, text: TextSide) -> Tensor | None:
        # From long to short, so that each block has texts of similar length. Ties keep their order.
        if "micro" not in text.tokens:
            return None
        return text.tokens["micro"].mask.sum(1).sort(descending=True, stable=True).indices

    def partition(self, text: TextFeatures, video: VideoFeatures) -> tuple[Tensor, Tensor]:
        """Return masks (B, F) of the Spot-Path and Recover-Path frames of B matching pairs (Eq. 3)."""
        mask = video.frame_mask.bool()
        similarity = torch.einsum("bd,bfd->bf", unit(text.sentence), unit(video.frames))
        spot = spot_frames(similarity, mask, self.options.spot_ratio)
        return spot, recover_frames(spot, mask)

    def matching(self, text: TextFeatures, video: VideoFeatures, captions: Captions | None = None) -> dict[str, Tensor]:
        """Score B matching pairs in all paths. Without the videos' captions, the Recover-Path is left out.

        Returns:
            S_m of the original pairs (B, B) with the names of the views, and of the paths as `spot.{view}` and
            `recover.{view}`.
        """
        text, video = text.float(), video.float()
        with torch.autocast(text.sentence.device.type, enabled=False):
            sides, whole = self.of_text(text), self.of_video(video)
            parts = dict(self.in_blocks(self.score, sides, whole).parts)
            spot, recover = self.partition(text, video)
            if "spot" in self.options.paths:
                parts |= self._path("spot", sides, video, spot)
            if "recover" in self.options.paths and captions is not None:
                described = self.of_captions(text, captions.float(), video, recover)
                parts |= self._path("recover", described, video, recover)
        return parts

    def _path(
        self, name: Literal["spot", "recover"], text: TextSide, video: VideoFeatures, frames: Tensor
    ) -> dict[str, Tensor]:
        """Return the scores (B, B) of a path as `{name}.{view}`, of the paired `frames` (B, F) or of each pair's."""
        pairwise = self.options.spot_partition == "pairwise"
        part: FrameSet = name if pairwise else "all"
        side = self.of_video(video, None if pairwise else frames)
        scores = self.in_blocks(lambda some, few: self.score(some, few, part), text, side)
        return {f"{name}.{view}": score for view, score in scores.parts.items()}


def interaction(name: str, weighted: WeightedMax, slots: tuple[int, int]) -> Interaction:
    """Return the interaction of a view by name (Table 5); `slots` are the numbers of tokens for UCoFiA's."""
    if name == "mean":
        return MeanInteraction()
    return SimilarityAggregation(*slots) if name == "ucofia" else weighted


# Losses (section 3.4)


def view_divergence(original: Tensor, path: Tensor, scale: Tensor, options: Divergence) -> tuple[Tensor, Tensor]:
    """Return the KL divergences of a path's scores (B, B) from the original ones, over rows and columns (Eq. 11)."""
    scale = scale if options.scores == "logits" else torch.ones_like(scale)
    if options.direction == "path-to-original":
        original, path = path.detach(), original

    def divergence(dim: int) -> Tensor:
        reference, follower = (scale * original).log_softmax(dim), (scale * path).log_softmax(dim)
        total = (reference.exp() * (reference - follower)).sum()
        return total / (len(original) if options.reduction == "batchmean" else original.numel())

    return divergence(1), divergence(0)
