"""DPDV: Dual-Pathway and Dual-View Representation Learning for Bridging Information Asymmetry in Text-Video Retrieval.

There is no public code; the submission is anonymous. What the paper leaves open is an option, whose docstring names the
default's reason. Building blocks follow HBI, TCFormer and DRL, which the paper builds on.

Deviations:
- clustering: paper Eq. 7 has its minimum and maximum over the wrong index; here as in the clustering that it cites
  (TCFormer, HBI).
- macro view: paper Eq. 6 "simplifies" Eq. 5 for one sentence and thereby drops the sentence's best frame; here Eq. 6
  (`macro_form`).
- patches: paper not stated; here CLIP's, through its last LayerNorm and projection, as HBI and UCoFiA take them.
- temporal encoder: paper mentions none; here none (`temporal_layers` adds CLIP4Clip's).
- partition: paper L+ and L- index one set of frames per sample; here the paired text divides them (`spot_partition`).
- order of time: paper not stated; here kept within each path, and no gradient passes the choice of frames and captions.
- padded frames: paper not stated; here they take no part, and the Spot-Path has the share `spot_ratio` of a video's own
  frames, rounded up.
- a single frame: paper not stated; here, as it cannot be divided, it is in both paths.
- patch merging in the original pair: paper not stated; here of all frames, as the KL terms compare like with like only
  so.
- weights theta: paper not stated; here MLPs of HBI's sizes, one per kind of token, shared by all paths.
- test: paper "aggregated"; here the mean of both views' scores, and generated captions take no part.
- optimiser: paper not stated; here AdamW with CLIP's decay, new modules at ten times the encoders' rate (`optimizer`).
- captioner: paper VILA; here any captions file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tvr_lightning.data.batch import PairBatch
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import PairedFeatures, Record, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.patch_selector import PatchSelection as PatchSelectionConfig
from tvr_lightning.layers.patch_selector import PatchSelector, first_largest
from tvr_lightning.layers.temporal import temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.methods.dpdv.captions import CaptionError, Captions, encode_captions, padded_captions
from tvr_lightning.methods.dpdv.interactions import Interaction, MeanPooling, SimilarityAggregation, WeightedMax
from tvr_lightning.methods.dpdv.options import (
    DivergenceConfig,
    DPDVConfig,
    InteractionKind,
    MacroForm,
    PatchReduction,
    Pathway,
    SpotPartition,
    View,
)
from tvr_lightning.methods.dpdv.patch_merging import PatchMerging, PatchMergingConfig
from tvr_lightning.methods.dpdv.weighted_max import Tokens, by_length
from tvr_lightning.pairwise import score_in_blocks
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.losses import info_nce
from tvr_lightning.training.optim import OptimizerConfig


@dataclass
class TextSide(Record):
    """What N texts bring to a path: their sentence (or captions), their words, and the sentence that divides frames.

    The dividing sentence `query` is (N, D), at unit length.
    """

    macro: Tokens | None
    micro: Tokens | None
    query: Tensor


@dataclass
class VideoSide(Record):
    """What M videos bring to a path: frames, patches, and the frames that a text divides, unit (M, F, D), with mask."""

    macro: Tokens | None
    micro: Tokens | None
    frames: Tensor
    frame_mask: Tensor


# Dual-Pathway Partitioning Module (section 3.2)


@torch.no_grad()
def spot_frames(similarity: Tensor, frame_mask: Tensor, ratio: float) -> Tensor:
    """Mark the frames of the Spot-Path: the share `ratio` most similar to the sentence (Eq. 3).

    Args:
        similarity: (..., F) cosines of a sentence with the frames.
        frame_mask: (..., F) bool, True where there is a frame.
        ratio: share of a video's frames, rounded up; from two frames on, at least one is left over.

    Returns:
        (..., F) bool; of equally similar frames the earlier.
    """
    valid = frame_mask.sum(-1, keepdim=True)
    # 1e-6 takes back what thirds and tenths lack in binary.
    kept = torch.ceil(valid * ratio - 1e-6).long().clamp(min=1)
    kept = torch.minimum(kept, (valid - 1).clamp(min=1))
    order = first_largest(similarity.masked_fill(~frame_mask, -torch.inf), similarity.shape[-1])
    place = order.argsort(dim=-1)
    return (place < kept) & frame_mask


def recover_frames(spot: Tensor, frame_mask: Tensor) -> Tensor:
    """Mark the frames of the Recover-Path (..., F): those not spotted; of a single frame, that frame."""
    rest = frame_mask & ~spot
    return torch.where(rest.any(-1, keepdim=True), rest, frame_mask)


@torch.no_grad()
def caption_order(captions: Tensor, mask: Tensor, frames: Tensor, recover: Tensor) -> tuple[Tensor, Tensor]:
    """Rank the captions of each video by their cosine with the mean of its Recover-Path frames (Eq. 4).

    Args:
        captions: (B, S, D) sentences.
        mask: (B, S) bool, True where there is a caption.
        frames: (B, F, D), not normalised: so is their mean in the paper.
        recover: (B, F) bool.

    Returns:
        Cosines (B, S), and the order (B, S) from the most similar; places without a caption come last.
    """
    chosen = recover.unsqueeze(-1).to(frames.dtype)
    mean = (frames * chosen).sum(1) / chosen.sum(1).clamp(min=1)
    cosine = torch.einsum("bsd,bd->bs", unit(captions), unit(mean))
    return cosine, first_largest(cosine.masked_fill(~mask, -torch.inf), captions.shape[1])


def view_divergence(original: Tensor, path: Tensor, scale: Tensor, config: DivergenceConfig) -> tuple[Tensor, Tensor]:
    """KL divergence between the scores of the original pairs and those of a path, over rows and over columns (Eq. 11).

    Args:
        original: (B, B) scores S_m.
        path: (B, B) scores S_m+-.
        scale: exp(logit_scale).
        config: direction, reduction, and whether the scale is applied.

    Returns:
        Two scalars: over rows (texts to videos), over columns; their mean enters the loss.
    """
    scale = scale if config.scores == "logits" else torch.ones_like(scale)
    if config.direction == "path-to-original":
        original, path = path.detach(), original

    def divergence(dim: int) -> Tensor:
        reference, follower = (scale * original).log_softmax(dim), (scale * path).log_softmax(dim)
        total = (reference.exp() * (reference - follower)).sum()
        return total / (len(original) if config.reduction == "batchmean" else original.numel())

    return divergence(1), divergence(0)


def _interaction(kind: InteractionKind, dimension: int, slots: tuple[int, int], **weighted: bool) -> Interaction:
    if kind == "mean":
        return MeanPooling()
    return SimilarityAggregation(*slots) if kind == "ucofia" else WeightedMax(dimension, **weighted)


class DPDVHead(nn.Module):
    """Both views of the original pairs, and for matching pairs those of both paths (sections 3.2 and 3.3).

    Args:
        dimension: D.
        words: W, which UCoFiA's aggregation fixes.
        frames: F, likewise.
        config: switches.
    """

    def __init__(self, dimension: int, words: int = 32, frames: int = 12, config: DPDVConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or DPDVConfig()
        self.macro = self.micro = None
        if "macro" in config.views:  # Eqs. 5 and 6
            several, simplified = config.recover_captions > 1, config.macro_form == "eq6"
            weights = {"text_weights": several, "simplified": simplified}
            self.macro = _interaction(config.macro_interaction, dimension, (1, frames), **weights)
        if "micro" in config.views:  # Eq. 9
            slots = (words, frames * config.patches_per_frame)
            self.micro = _interaction(config.micro_interaction, dimension, slots)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):  # as HBI initialises
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(
        self, text: TextFeatures, video: VideoFeatures, captions: Captions | None = None, paths: bool = False
    ) -> Scores:
        """Score N texts against M videos.

        Args:
            text: of N texts.
            video: of M videos.
            captions: of the videos, for the Recover-Path.
            paths: score the paths too; row i of text, video and captions must then belong together.

        Returns:
            `similarity` (N, M), the mean over the views of the original pairs' scores. `parts`: these scores under the
            views' names and, with paths, those of the paths as `spot.{view}` and `recover.{view}`.

        Raises:
            ValueError: no patches although the micro view needs them, or another number of words or frames than
                UCoFiA's aggregation was built for.
        """
        with torch.autocast(text.sentence.device.type, enabled=False):
            text, video = text.float(), video.float()
            parts = self._score(self._texts(text), self._videos(video, video.frame_mask), "all")
            if paths:
                parts |= self._paths(text, video, captions)
        similarity = torch.stack([parts[view] for view in self.config.views]).mean(0)
        return Scores(similarity, parts)

    def partition(self, text: TextFeatures, video: VideoFeatures) -> tuple[Tensor, Tensor]:
        """Return the frames (B, F) of the Spot-Path and of the Recover-Path of B matching pairs (Eq. 3)."""
        mask = video.frame_mask.bool()
        similarity = torch.einsum("bd,bfd->bf", unit(text.sentence), unit(video.frames))
        spot = spot_frames(similarity, mask, self.config.spot_ratio)
        return spot, recover_frames(spot, mask)

    def _paths(self, text: TextFeatures, video: VideoFeatures, captions: Captions | None) -> dict[str, Tensor]:
        spot, recover = self.partition(text, video)
        pairwise = self.config.spot_partition == "pairwise"
        parts: dict[str, Tensor] = {}
        if "spot" in self.config.paths:
            frames = video.frame_mask if pairwise else spot
            found = self._score(self._texts(text), self._videos(video, frames), "spot" if pairwise else "all")
            parts |= {f"spot.{view}": score for view, score in found.items()}
        if "recover" in self.config.paths and captions is not None:
            frames = video.frame_mask if pairwise else recover
            side = self._captions(text, captions.float(), video, recover)
            found = self._score(side, self._videos(video, frames), "recover" if pairwise else "all")
            parts |= {f"recover.{view}": score for view, score in found.items()}
        return parts

    def _texts(self, text: TextFeatures) -> TextSide:
        sentence = text.sentence.unsqueeze(1)
        one = torch.ones(sentence.shape[:2], dtype=torch.bool, device=sentence.device)
        macro = None if self.macro is None else self.macro.text(sentence, one)
        micro = None if self.micro is None else self.micro.text(text.words, text.word_mask)
        return TextSide(macro, micro, unit(text.sentence))

    def _captions(self, text: TextFeatures, captions: Captions, video: VideoFeatures, recover: Tensor) -> TextSide:
        """The N_s^- captions nearest to the Recover-Path's frames: several are one bag of sentences and of words."""
        _, order = caption_order(captions.sentence, captions.mask, video.frames, recover)
        rows = torch.arange(len(order), device=order.device).unsqueeze(1)
        chosen = order[:, : self.config.recover_captions]
        mask = captions.mask[rows, chosen]
        macro = None if self.macro is None else self.macro.text(captions.sentence[rows, chosen], mask)
        words, word_mask = captions.words[rows, chosen], captions.word_mask[rows, chosen] & mask.unsqueeze(-1)
        micro = None if self.micro is None else self.micro.text(words.flatten(1, 2), word_mask.flatten(1, 2))
        return TextSide(macro, micro, unit(text.sentence))

    def _videos(self, video: VideoFeatures, mask: Tensor) -> VideoSide:
        mask = mask.bool()
        macro = None if self.macro is None else self.macro.video(video.frames, mask)
        micro = None
        if self.micro is not None:
            if video.patches is None:
                raise ValueError("DPDV's micro view needs patches; set views to [macro] to go without them")
            per_frame = mask.repeat_interleave(video.patches.shape[2], dim=1)
            micro = self.micro.video(video.patches.flatten(1, 2), per_frame)
        return VideoSide(macro, micro, unit(video.frames), mask)

    def _score(self, text: TextSide, video: VideoSide, frames: str) -> dict[str, Tensor]:
        """Score block by block, the longest texts first, so that a block's texts are of similar length."""
        order = torch.arange(len(text), device=text.query.device) if text.micro is None else by_length(text.micro)

        def block(some: TextSide, few: VideoSide) -> Scores:
            parts = self._score_block(some, few, frames)
            return Scores(next(iter(parts.values())), parts)

        element, device = text.query.element_size(), text.query.device
        usual = 1024 if device.type != "cpu" else 512 if torch.is_grad_enabled() else 64
        budget = 2**20 * (self.config.memory_budget or usual)
        found = score_in_blocks(block, text[order], video, self._pair_bytes(text, video, element), budget)
        inverse = order.argsort()
        return {view: score[inverse] for view, score in found.parts.items()}

    def _score_block(self, text: TextSide, video: VideoSide, frames: str) -> dict[str, Tensor]:
        chosen = self._pair_frames(text, video, frames)
        parts = {}
        if self.macro is not None and text.macro is not None and video.macro is not None:
            parts["macro"] = self.macro(text.macro, video.macro, chosen)
        if self.micro is not None and text.micro is not None and video.micro is not None:
            if chosen is not None:
                chosen = chosen.repeat_interleave(video.micro.mask.shape[1] // chosen.shape[2], dim=2)
            parts["micro"] = self.micro(text.micro, video.micro, chosen)
        return parts

    def _pair_frames(self, text: TextSide, video: VideoSide, frames: str) -> Tensor | None:
        """Frames (N, M, F) that each pair has, where each text divides each video's frames."""
        if frames == "all":
            return None
        similarity = torch.einsum("nd,mfd->nmf", text.query, video.frames)
        mask = video.frame_mask.expand_as(similarity)
        spot = spot_frames(similarity, mask, self.config.spot_ratio)
        return spot if frames == "spot" else recover_frames(spot, mask)

    def _pair_bytes(self, text: TextSide, video: VideoSide, element: int) -> int:
        total = 8 * video.frames.shape[1]  # the masks of a pairwise partition
        for interaction, some, few in ((self.macro, text.macro, video.macro), (self.micro, text.micro, video.micro)):
            if interaction is not None and some is not None and few is not None:
                total += interaction.pair_bytes(some.mask.shape[1], few.mask.shape[1], element)
        return total


class DPDV(RetrievalModule):
    """DPDV: frames divided by the text, captions for what it leaves out, sentence-frame and word-patch interaction.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give.
        contrast: what else the contrastive loss does with logits.
        temporal_layers: blocks of CLIP4Clip's temporal transformer on the frames; 0, as none is mentioned.
        views: `macro`, sentences against frames, and `micro`, words against patches (Table 4).
        paths: `spot` and `recover` (Table 3); none trains on the original pairs alone.
        spot_ratio: share of a video's frames in the Spot-Path (paper: 0.5; Table S6 has 1/3 and 2/3).
        spot_partition: `paired`: the matching text divides a video's frames for all texts; `pairwise`: every text
            divides the frames of every video by itself.
        captions: N_s, most descriptions of a video (paper: 6).
        recover_captions: N_s^-, descriptions that the Recover-Path takes (paper: 1; Table S8 up to 3).
        macro_interaction: `weighted-max` (Eqs. 5 and 6), `ucofia`'s aggregation, or `mean` pooling (Eq. 1) (Table 5).
        micro_interaction: `weighted-max` (Eq. 9), `ucofia`, or `mean` (Table 5).
        macro_form: for single sentences `eq6`, the weighted sum over frames, or `eq5`, which adds the best frame.
        patch_reduction: `merge` (section 3.3), `average` to one patch, `select` as UCoFiA does, or `none` (Table S10).
        patch_merging: schedule and clustering.
        patch_selection: for `select`.
        original_loss: train on the original pairs, L of Eq. 12 (Table 6).
        path_weight: alpha of Eq. 12 (paper: 0.5).
        divergence: KL terms, beta of Eq. 12 (paper: 0.1).
        memory_budget: memory for one block of pairs in MiB; by default 1024, on a CPU 512 in training and 64 otherwise.

    Raises:
        ValueError: switches that do not fit each other.
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
        temporal_layers: int = 0,
        views: tuple[View, ...] = ("macro", "micro"),
        paths: tuple[Pathway, ...] = ("spot", "recover"),
        spot_ratio: float = 0.5,
        spot_partition: SpotPartition = "paired",
        captions: int = 6,
        recover_captions: int = 1,
        macro_interaction: InteractionKind = "weighted-max",
        micro_interaction: InteractionKind = "weighted-max",
        macro_form: MacroForm = "eq6",
        patch_reduction: PatchReduction = "merge",
        patch_merging: PatchMergingConfig | None = None,
        patch_selection: PatchSelectionConfig | None = None,
        original_loss: bool = True,
        path_weight: float = 0.5,
        divergence: DivergenceConfig | None = None,
        memory_budget: int | None = None,
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather, contrast)
        config = DPDVConfig(
            views=tuple(views),
            paths=tuple(paths),
            spot_ratio=spot_ratio,
            spot_partition=spot_partition,
            captions=captions,
            recover_captions=recover_captions,
            macro_interaction=macro_interaction,
            micro_interaction=micro_interaction,
            macro_form=macro_form,
            patch_reduction=patch_reduction,
            patch_merging=patch_merging or PatchMergingConfig(),
            patch_selection=patch_selection or PatchSelectionConfig(),
            original_loss=original_loss,
            path_weight=path_weight,
            divergence=divergence or DivergenceConfig(),
            memory_budget=memory_budget,
        )
        if temporal_layers < 0:
            raise ValueError(f"temporal_layers is {temporal_layers}; it must be at least 0")
        if config.paths and frames < 2:
            raise ValueError(f"frames is {frames}: two paths need at least 2; set paths to [] to go without them")
        self.needs_patches = "micro" in config.views
        self.temporal = temporal_transformer(encoder, temporal_layers, frames) if temporal_layers else None
        self.reduction = self._reduction(encoder.dimension, config)
        self.head = DPDVHead(encoder.dimension, words, frames, config)

    @staticmethod
    def _reduction(dimension: int, config: DPDVConfig) -> nn.Module | None:
        if "micro" not in config.views or config.patch_reduction in ("average", "none"):
            return None
        if config.patch_reduction == "select":
            return PatchSelector(dimension, config.patch_selection)
        return PatchMerging(dimension, config.patch_merging)

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Relate the frames (M, F, D) over time and reduce the patches (M, F, P, D) of every frame to (M, F, P', D)."""
        patches = video.patches if self.needs_patches else None
        if patches is not None and self.head.config.patch_reduction == "average":
            patches = patches.mean(2, keepdim=True)
        if patches is not None and self.reduction is not None:
            selects = isinstance(self.reduction, PatchSelector)
            patches = self.reduction(video.frames, patches) if selects else self.reduction(patches)
        frames = video.frames if self.temporal is None else self.temporal(video.frames, video.frame_mask)
        return dataclasses.replace(video, frames=frames, patches=patches)

    def encode_extras(self, batch: PairBatch) -> dict[str, Any]:
        """Encode the descriptions of the batch's videos, where the Recover-Path needs them.

        Returns:
            `captions`: Captions of the B videos.

        Raises:
            CaptionError: the data bring no captions, or a video too few or too many.
        """
        if "recover" not in self.head.config.paths:
            return {}
        listed = batch.extras.get("recover_captions")
        if listed is None:
            raise CaptionError(
                "DPDV's Recover-Path trains on captions of the videos, and the data bring none: name a captions file "
                "in data.init_args.captions (`tvr caption` writes one), or set model.init_args.paths to [spot]"
            )
        config = self.head.config
        descriptions = padded_captions(batch.video.video_id, listed, config.captions, config.recover_captions)
        return {"captions": encode_captions(self.encoder, descriptions, self.words)}

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos by all frames and all patches; captions take no part.

        Returns:
            `similarity` (N, M), the mean of the views' scores on the scale of a cosine; `parts`: the views' scores.
        """
        scores: Scores = self.head(text, video)
        return scores

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return the weighted terms of Eq. 12, scalars by name, for B matching pairs.

        `macro` and `micro` are L, `spot` and `recover` alpha times L+ and L-, `divergence` beta times L_KL.

        Raises:
            CaptionError: the Recover-Path is on and `pairs.extras` holds no captions.
        """
        config, scale = self.head.config, self.temperature()
        captions = pairs.extras.get("captions")
        if "recover" in config.paths and captions is None:
            raise CaptionError("DPDV's Recover-Path needs pairs.extras['captions'], which encode_extras makes")
        parts = self.head(pairs.text, pairs.video, captions, paths=True).parts
        terms: dict[str, Tensor] = {}
        if config.original_loss:
            terms |= {view: info_nce(self.contrastive_logits(scale * parts[view])) for view in config.views}
        if config.path_weight:
            for path in config.paths:
                logits = [self.contrastive_logits(scale * parts[f"{path}.{view}"]) for view in config.views]
                terms[path] = config.path_weight * torch.stack([info_nce(matrix) for matrix in logits]).sum()
        if config.divergence.weight:
            compared = [
                torch.stack(view_divergence(parts[view], parts[f"{path}.{view}"], scale, config.divergence)).mean()
                for path in config.paths
                for view in config.views
            ]
            terms["divergence"] = config.divergence.weight * torch.stack(compared).sum()
        return terms
