"""Parity cases of DPDV: the paper's equations written out plainly, since its authors have released no code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from parity.case import ParityCase
from torch import Tensor

from tvr_lightning.authors.names import load
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.dpdv.interactions import WeightedTokens
from tvr_lightning.methods.dpdv.model import (
    Captions,
    DPDVHead,
    caption_order,
    recover_frames,
    spot_frames,
    view_divergence,
)
from tvr_lightning.methods.dpdv.options import DensityRule, Divergence, DPDVOptions, EveryPatch, PatchMerging
from tvr_lightning.methods.dpdv.patch_merging import PatchFeatureMerging, dpc_knn, merge_tokens
from tvr_lightning.training.losses import info_nce

HEAD_NAMES = {
    "weight.sentence.": "macro.text_weights.layers.",
    "weight.frame.": "macro.video_weights.layers.",
    "weight.word.": "micro.text_weights.layers.",
    "weight.patch.": "micro.video_weights.layers.",
    "pfmm.": None,
}
VIEWS = ("macro", "micro")
PATHS = ("spot", "recover")


def import_head(checkpoint: Mapping[str, Tensor], source: str, options: DPDVOptions) -> DPDVHead:
    """Build the head from the tensors `weight.{token kind}.{layer}` of a case, in float64.

    Args:
        checkpoint: tensors by the case's names; `weight.frame.0.weight` (2D, D) gives the width.
        source: the file, for the error.
        options: of the paper.

    Raises:
        CaseError: names are missing or unexpected.
    """
    dimension = checkpoint["weight.frame.0.weight"].shape[1]
    head = DPDVHead(dimension, 32, 12, options).double()
    names = dict(HEAD_NAMES)
    if options.recover_captions == 1:  # one sentence needs no weight
        names["weight.sentence."] = None
    return load(head, checkpoint, names, source)


def import_merging(checkpoint: Mapping[str, Tensor], source: str, options: PatchMerging) -> PatchFeatureMerging:
    """Build the stages of patch merging from the tensors `pfmm.{stage}` of a case, in float64.

    `pfmm.0.norm.weight` (D,) gives the width.

    Raises:
        CaseError: names are missing or unexpected.
    """
    merging = PatchFeatureMerging(checkpoint["pfmm.0.norm.weight"].shape[0], options).double()
    names = {f"pfmm.{stage}.": f"stages.{stage}.attention." for stage in range(options.stages)} | {"weight.": None}
    return load(merging, checkpoint, names, source)


def compute_dpdv(case: ParityCase) -> dict[str, Tensor]:
    """Compute selections, merging stages, scores (B, B) and scalar losses of a DPDV case of B pairs, in float64."""
    given, source = case.config, str(case.path)
    found: dict[str, Tensor] = {}
    merging_options = PatchMerging(
        ratio=float(given.get("patch_ratio", 0.5)),
        stages=len({name.split(".")[1] for name in case.checkpoint if name.startswith("pfmm.")}),
        neighbours=int(given.get("knn", 3)),
        heads=int(given.get("attention_heads", 8)),
    )
    merging = import_merging(case.checkpoint, source, merging_options)
    counts = [int(size) for size in given.get("patch_sizes", [])[1:]]
    patches = _merging_stages(case.input("patches").double(), merging, counts, found)
    text = TextFeatures(case.input("sentence").double(), case.input("words").double(), case.input("text_mask").bool())
    video = VideoFeatures(case.input("frames").double(), case.input("frame_mask").bool(), patches)
    captions = _captions(case)
    single = _head(case, given)
    scores = _scores(single, text, video, captions)
    found |= _partition(single, text, video, captions, case)
    found |= _weights(single, text, video, found)
    found |= {f"score.{name}": score for name, score in scores.items()}
    for name, changes in _variants(given).items():
        head = _head(case, given, **changes)
        for key, score in _scores(head, text, video, captions).items():
            found |= {f"score.{ours}": score for ours in _names(name, key, given)}
    found |= _mean_pooling(case, text, video)
    found["similarity_test"] = single(text, video).similarity
    scale = case.input("logit_scale").double().exp().reshape(())
    found |= {
        f"loss.info_nce.{name.removeprefix('score.')}": info_nce(scale * score)
        for name, score in found.items()
        if name.startswith("score.") and not name.startswith("score.mean_pool")
    }
    return found | _losses(found, scores, scale, given)


def _head(case: ParityCase, given: Mapping[str, Any], **changes: Any) -> DPDVHead:
    options = DPDVOptions(
        spot_ratio=float(given.get("frame_ratio", 0.5)),
        captions=case.input("caption_sentence").shape[1],
        recover_captions=int(given.get("recover_captions", 1)),
    )
    return import_head(case.checkpoint, str(case.path), dataclasses.replace(options, **changes))


def _variants(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "eq5": {"macro_interaction": "weighted-max"},
        "pairwise": {"spot_partition": "pairwise"},
        "several": {"recover_captions": int(given.get("recover_captions_supplement", 2))},
    }


def _names(variant: str, score: str, given: Mapping[str, Any]) -> list[str]:
    """The case's names of a score of a variant; none where the variant changes nothing."""
    view, path = score.split(".")
    if variant == "eq5":
        return [f"macro_eq5.{path}"] if view == "macro" else []
    if variant == "pairwise":
        return [f"{score}_pairwise"] if path != "original" else []
    count = int(given.get("recover_captions_supplement", 2))
    supplement = {"macro": "macro_supp2", "micro": "micro_supp3"}[view]
    return [f"{supplement}.recover_{count}_captions"] if path == "recover" else []


def _captions(case: ParityCase) -> Captions:
    word_mask = case.input("caption_mask").bool()
    return Captions(
        case.input("caption_sentence").double(), case.input("caption_words").double(), word_mask, word_mask.any(2)
    )


def _scores(head: DPDVHead, text: TextFeatures, video: VideoFeatures, captions: Captions) -> dict[str, Tensor]:
    """Scores (N, M) as `{view}.{original | spot | recover}`."""
    parts = head.matching(text, video, captions)
    original = {f"{view}.original": parts[view] for view in VIEWS}
    return original | {f"{view}.{path}": parts[f"{path}.{view}"] for view in VIEWS for path in PATHS}


def _merging_stages(
    patches: Tensor, merging: PatchFeatureMerging, counts: list[int], found: dict[str, Tensor]
) -> Tensor:
    """Note what every stage makes of patches (M, F, P, D), and return the last ones (M, F, P', D)."""
    options, shape = merging.options, patches.shape[:2]
    counts = counts or options.schedule(patches.shape[2])
    for number, (stage, clusters) in enumerate(zip(merging.stages, counts, strict=True)):
        rules: dict[str, DensityRule] = {"": "paper", ".self_excluded": "neighbours", ".hbi": "hbi"}
        for suffix, rule in rules.items():
            clustered = dpc_knn(patches, clusters, options.neighbours, rule)
            found |= {
                f"pfmm.{number}.density{suffix}": clustered.density,
                f"pfmm.{number}.delta{suffix}": clustered.delta,
                f"pfmm.{number}.centre{suffix}": clustered.centre,
                f"pfmm.{number}.assignment{suffix}": clustered.assignment,
                f"pfmm.{number}.merged{suffix}": merge_tokens(patches, clustered.assignment, clusters),
            }
        patches = stage(patches.flatten(0, 1), clusters).unflatten(0, shape)
        found[f"pfmm.{number}.after_attention"] = patches
    return patches


def _partition(
    head: DPDVHead, text: TextFeatures, video: VideoFeatures, captions: Captions, case: ParityCase
) -> dict[str, Tensor]:
    similarity = torch.einsum("nd,mfd->nmf", unit(text.sentence), unit(video.frames))
    mask = video.frame_mask
    spot, recover = head.partition(text, video)
    each = spot_frames(similarity, mask.expand_as(similarity), head.options.spot_ratio)
    cosine, order = caption_order(captions.sentence, captions.mask, video.frames, recover)
    return {
        "sentence_frame_cosine(text,video,frame)": similarity.masked_fill(~mask, 0.0),
        "spot_mask_paired(video,frame)": spot,
        "recover_mask_paired(video,frame)": recover_frames(spot, mask),
        "spot_mask_pairwise(text,video,frame)": each,
        "caption_cosine(video,caption)": cosine,
        "caption_order(video,rank)": order,
    }


def _weights(
    head: DPDVHead, text: TextFeatures, video: VideoFeatures, found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    assert head.macro is not None  # the cases have both views
    assert head.micro is not None
    spot = found["spot_mask_paired(video,frame)"]
    words: WeightedTokens = head.micro.prepared("text", text.words, text.word_mask)
    return {
        "theta.frame(all frames)": head.macro.prepared("video", video.frames, video.frame_mask).weights,
        "theta.frame(spot frames)": head.macro.prepared("video", video.frames, spot).weights,
        "theta.word": words.weights,
    }


def _mean_pooling(case: ParityCase, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
    """Eq. 1, whose patches are the frames' own, before any merging."""
    original = dataclasses.replace(video, patches=case.input("patches").double())
    options = DPDVOptions(macro_interaction="mean", micro_interaction="mean", patch_reduction=EveryPatch())
    parts = DPDVHead(text.sentence.shape[1], 32, 12, options)(text, original).parts
    return {"score.mean_pool.sentence_frame": parts["macro"], "score.mean_pool.word_patch": parts["micro"]}


def _losses(
    found: Mapping[str, Tensor], scores: Mapping[str, Tensor], scale: Tensor, given: Mapping[str, Any]
) -> dict[str, Tensor]:
    losses: dict[str, Tensor] = {}
    reverse = Divergence(direction="path-to-original")
    helper = Divergence(scores="cosines", reduction="mean")
    for view in VIEWS:
        for path in PATHS:
            pair = (scores[f"{view}.original"], scores[f"{view}.{path}"], scale)
            rows, columns = view_divergence(*pair, Divergence())
            losses[f"loss.kl_rows.{view}.{path}"] = rows
            losses[f"loss.kl_columns.{view}.{path}"] = columns
            losses[f"loss.kl.{view}.{path}"] = (rows + columns) / 2
            losses[f"loss.kl_reverse.{view}.{path}"] = sum(view_divergence(*pair, reverse), scale * 0) / 2
            losses[f"loss.kl_hbi_helper.{view}.{path}"] = sum(view_divergence(*pair, helper), scale * 0) / 2
    contrast = {path: sum((found[f"loss.info_nce.{view}.{path}"] for view in VIEWS), scale * 0) for path in PATHS}
    original = sum((found[f"loss.info_nce.{view}.original"] for view in VIEWS), scale * 0)
    divergence = sum((losses[f"loss.kl.{view}.{path}"] for view in VIEWS for path in PATHS), scale * 0)
    alpha, beta = float(given.get("alpha", 0.5)), float(given.get("beta", 0.1))
    return losses | {
        "loss.original": original,
        "loss.plus": contrast["spot"],
        "loss.minus": contrast["recover"],
        "loss.kl": divergence,
        "loss.total": original + alpha * (contrast["spot"] + contrast["recover"]) + beta * divergence,
    }
