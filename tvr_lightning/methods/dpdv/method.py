"""DPDV: Dual-Pathway and Dual-View Representation Learning for Bridging Information Asymmetry in Text-Video Retrieval.

The equations are in `model.py`, in the order of section 3 of the paper. There is no public code, and the submission is
anonymous. Everything that the paper leaves open is an option, whose description gives the reason for the default.
Building blocks follow HBI, TCFormer, and DRL, on which the paper builds.

Deviations:
- clustering: paper Eq. 7 has its minimum and maximum over the wrong index; here as in the clustering that it cites
  (TCFormer, HBI).
- macro view: paper Eq. 6 "simplifies" Eq. 5 for one sentence and thereby drops the sentence's best frame; here Eq. 6
  (`macro_interaction`).
- patches: paper not stated; here CLIP's, after its last LayerNorm and projection, as in HBI and UCoFiA.
- temporal encoder: paper mentions none; here none (`temporal_layers` adds CLIP4Clip's).
- partition: paper L+ and L- index one set of frames per sample; here the paired text divides them (`spot_partition`).
- order of time: paper not stated; here kept within each path, and the selection of frames and captions has no gradient.
- padded frames: paper not stated; here they are excluded, and the Spot-Path has the share `spot_ratio` of a video's own
  frames, rounded up.
- a single frame: paper not stated; here it is in both paths, because it cannot be divided.
- patch merging in the original pair: paper not stated; here of all frames, because otherwise the KL terms would compare
  different quantities.
- neighbors and heads of the merging: paper states neither k of the clustering nor the attention's heads; here 3 and 8,
  as in HBI (`patch_reduction`).
- divergence: paper does not state softmaxes, scale or reduction; here over rows and columns of the scaled logits, the
  mean over the batch, literally KL(original || path) (`divergence`).
- weights theta: paper not stated; here MLPs of HBI's sizes, one per kind of token, shared by all paths.
- test: paper "aggregated"; here the mean of both views' scores, without generated captions.
- optimizer: paper not stated; here AdamW with CLIP's decay, new modules at ten times the encoders' rate (`optimizer`).
- captioner: paper uses VILA; here any captions file.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.data.batch import PairBatch, Tokens
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.patch_selector import PatchSelector
from tvr_lightning.layers.temporal import temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.dpdv.model import Captions, DPDVHead, view_divergence
from tvr_lightning.methods.dpdv.options import AveragePatches, DPDVOptions, PatchMerging, SelectedPatches
from tvr_lightning.methods.dpdv.patch_merging import PatchFeatureMerging
from tvr_lightning.training.losses import info_nce


def nonempty(video_id: str, described: Sequence[str], most: int, least: int) -> list[int]:
    """Return the positions of the nonempty descriptions of a video.

    Raises:
        UserError: There are fewer than `least` or more than `most`.
    """
    places = [place for place, text in enumerate(described) if text.strip()]
    if len(places) < least:
        raise UserError(
            f"{video_id} has {len(places)} descriptions, but the Recover-Path needs {least}. Add descriptions to the "
            "captions file, or lower model.init_args.dpdv.recover_captions."
        )
    if len(places) > most:
        raise UserError(
            f"{video_id} has {len(places)} descriptions, more than model.init_args.dpdv.captions {most}. Raise it."
        )
    return places


def described(
    video_ids: list[str],
    descriptions: Sequence[list[str] | Tokens],
    tokenize: Callable[[list[str]], Tokens] | None,
    most: int,
    least: int,
    device: torch.device,
) -> tuple[list[str] | Tokens, Tensor]:
    """Return `most` descriptions of each of B videos, of which at least `least` are given, and their mask (B, most).

    They are strings without `tokenize`, otherwise tokens; missing ones are "".
    """
    texts = [""]
    rows = []
    counts = []
    for video_id, listed in zip(video_ids, descriptions, strict=True):
        strings = list(listed)
        places = nonempty(video_id, strings, most, least)
        rows += [*(len(texts) + place for place in places), *[0] * (most - len(places))]
        texts += strings
        counts.append(len(places))
    mask = torch.arange(most) < torch.tensor(counts).unsqueeze(1)
    chosen: list[str] | Tokens = [texts[row] for row in rows]
    tokens = [each for each in descriptions if isinstance(each, Tokens)]
    if tokens and tokenize is not None:
        every = Tokens.cat([tokenize([""]).to(device, non_blocking=True), *tokens])
        index = torch.tensor(rows).to(device, non_blocking=True)
        needed = [every.needed[row] for row in rows]
        chosen = Tokens(list(chosen), every.ids[index], every.mask[index], needed)
    elif tokenize is not None:
        chosen = tokenize(list(chosen)).to(device, non_blocking=True)
    return chosen, mask.to(device, non_blocking=True)


class DPDV(RetrievalModule):
    """DPDV: frames divided by the text, captions for the remaining frames, sentence-frame and word-patch interaction.

    Args:
        encoder: encoder of texts and videos.
        dpdv: options of DPDV.
    """

    def __init__(self, encoder: Encoder, *, dpdv: DPDVOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = dpdv or DPDVOptions()
        if options.paths and self.frames < 2:
            raise UserError(
                f"frames is {self.frames}, but two paths need at least 2. Set paths to [] to train without them."
            )
        self.needs_patches = "micro" in options.views
        self.temporal = temporal_transformer(encoder, options.temporal_layers, self.frames)
        self.reduction: nn.Module | None = None
        reduction = options.patch_reduction
        if self.needs_patches and isinstance(reduction, PatchMerging):
            self.reduction = PatchFeatureMerging(encoder.dimension, reduction)
        elif self.needs_patches and isinstance(reduction, SelectedPatches):
            self.reduction = PatchSelector(encoder.dimension, reduction.selection)
        head = DPDVHead(encoder.dimension, self.words, self.frames, options)
        self.head = head.within(self.evaluation_config.memory_gib)

    @override
    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        patches = video.patches if self.needs_patches else None  # (M, F, P, D)
        if patches is not None and isinstance(self.options.patch_reduction, AveragePatches):
            patches = patches.mean(2, keepdim=True)
        if patches is not None and self.reduction is not None:
            selects = isinstance(self.reduction, PatchSelector)
            patches = self.reduction(video.frames, patches) if selects else self.reduction(patches)
        return dataclasses.replace(super().encode_video(video), patches=patches)

    @override
    def encode_extras(self, batch: PairBatch) -> dict[str, Any]:
        if "recover" not in self.options.paths:
            return {}
        listed = batch.extras.get("recover_captions")
        if listed is None:
            raise UserError(
                "DPDV's Recover-Path trains on captions of the videos, but the data has none. Set "
                "data.init_args.extra_captions to a captions file (`tvr caption` writes one), or set "
                "model.init_args.dpdv.paths to [spot]."
            )
        most, least = self.options.captions, self.options.recover_captions
        tokenize = self.encoder.caption_tokens(self.words)
        texts, mask = described(batch.video.video_id, listed, tokenize, most, least, self.device)
        # The chosen captions get a gradient in `pair_features`.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not isinstance(texts, Tokens)):
            captions = Captions.of(self.encoder.encode_text(texts, self.words, trim=True), mask)
        return {"captions": captions, "tokens": texts} if isinstance(texts, Tokens) else {"captions": captions}

    @override
    def pair_features(self, batch: PairBatch) -> PairedFeatures:
        pairs = super().pair_features(batch)
        tokens = pairs.extras.pop("tokens", None)
        if tokens is not None:
            captions, tokens = pairs.extras["captions"], tokens.trimmed()
            order = self.head.chosen_captions(pairs.text, pairs.video, captions)
            rows = torch.arange(len(order), device=order.device).unsqueeze(1)
            places = (rows * captions.mask.shape[1] + order).flatten()
            features = self.encoder.encode_text(Tokens([], tokens.ids[places], tokens.mask[places], []), self.words)
            pairs.extras["captions"] = Captions.of(
                features.padded(captions.words.shape[2]), captions.mask.gather(1, order)
            )
        return pairs

    @override
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        return self.head(text, video)  # from all frames and patches; captions are not used

    @override
    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        options = self.options
        scale = self.temperature()
        captions = pairs.extras.get("captions")
        if "recover" in options.paths and captions is None:
            raise UserError("DPDV's Recover-Path needs pairs.extras['captions'], which encode_extras makes")
        parts = self.head.matching(pairs.text, pairs.video, captions)
        losses = {name: info_nce(self.contrastive_logits(scale * part)) for name, part in parts.items()}  # Eq. 10
        terms: dict[str, Tensor] = {}
        if options.original_loss:  # L of Eq. 12
            terms |= {view: losses[view] for view in options.views}
        if options.path_weight:  # alpha L+ and alpha L- of Eq. 12
            for path in options.paths:
                of_views = torch.stack([losses[f"{path}.{view}"] for view in options.views])
                terms[path] = options.path_weight * of_views.sum()
        if options.divergence.weight:  # beta L_KL of Eq. 12
            compared = [
                torch.stack(view_divergence(parts[view], parts[f"{path}.{view}"], scale, options.divergence)).mean()
                for path in options.paths
                for view in options.views
            ]
            terms["divergence"] = options.divergence.weight * torch.stack(compared).sum()
        return terms
