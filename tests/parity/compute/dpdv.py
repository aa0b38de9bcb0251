"""Cases of DPDV of B pairs: the paper's equations written out in float64, since its authors have released no code."""

import dataclasses

import torch

from tvr_lightning.authors.names import load
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.dpdv.model import (
    Captions,
    DPDVHead,
    caption_order,
    recover_frames,
    spot_frames,
    view_divergence,
)
from tvr_lightning.methods.dpdv.options import Divergence, DPDVOptions, EveryPatch, PatchMerging
from tvr_lightning.methods.dpdv.patch_merging import PatchFeatureMerging, dpc_knn, merge_tokens
from tvr_lightning.training.losses import info_nce

HEAD_NAMES = {
    "weight.sentence.": "macro.text_weights.layers.", "weight.frame.": "macro.video_weights.layers.",
    "weight.word.": "micro.text_weights.layers.", "weight.patch.": "micro.video_weights.layers.", "pfmm.": None,
}  # fmt: skip
VIEWS = ("macro", "micro")
PATHS = ("spot", "recover")
PAIRS = [(view, path) for view in VIEWS for path in PATHS]
RULES = {"": "paper", ".self_excluded": "neighbors", ".hbi": "hbi"}


def head_of(case, **changes):
    options = DPDVOptions(
        spot_ratio=float(case.config.get("frame_ratio", 0.5)),
        captions=case.inputs["caption_sentence"].shape[1],
        recover_captions=int(case.config.get("recover_captions", 1)),
    )
    options = dataclasses.replace(options, **changes)
    head = DPDVHead(case.checkpoint["weight.frame.0.weight"].shape[1], 32, 12, options).double()
    # One sentence needs no weight.
    unused = {"weight.sentence.": None} if options.recover_captions == 1 else {}
    return load(head, case.checkpoint, HEAD_NAMES | unused, str(case.path))


def merge(case, patches):
    """Return the output of every stage for patches (M, F, P, D), and the last patches (M, F, P', D)."""
    given, found = case.config, {}
    options = PatchMerging(
        ratio=float(given.get("patch_ratio", 0.5)),
        stages=len({name.split(".")[1] for name in case.checkpoint if name.startswith("pfmm.")}),
        neighbors=int(given.get("knn", 3)),
        heads=int(given.get("attention_heads", 8)),
    )
    merging = PatchFeatureMerging(patches.shape[-1], options).double()
    names = {f"pfmm.{stage}.": f"stages.{stage}.attention." for stage in range(options.stages)} | {"weight.": None}
    load(merging, case.checkpoint, names, str(case.path))
    counts = given.get("patch_sizes", [])[1:] or options.schedule(patches.shape[2])
    for number, (stage, clusters) in enumerate(zip(merging.stages, counts, strict=True)):
        for suffix, rule in RULES.items():
            clustered = dpc_knn(patches, clusters, options.neighbors, rule)
            for name, tensor in zip(("density", "delta", "centre", "assignment"), clustered, strict=True):
                found[f"pfmm.{number}.{name}{suffix}"] = tensor
            found[f"pfmm.{number}.merged{suffix}"] = merge_tokens(patches, clustered.assignment, clusters)
        patches = stage(patches.flatten(0, 1), clusters).unflatten(0, patches.shape[:2])
        found[f"pfmm.{number}.after_attention"] = patches
    return found, patches


def compute_dpdv(case):
    given = {name: tensor.bool() if "mask" in name else tensor.double() for name, tensor in case.inputs.items()}
    found, patches = merge(case, given["patches"])
    text = TextFeatures(given["sentence"], given["words"], given["text_mask"])
    video = VideoFeatures(given["frames"], given["frame_mask"], patches)
    word_mask = given["caption_mask"]
    captions = Captions(given["caption_sentence"], given["caption_words"], word_mask, word_mask.any(2))
    head = head_of(case)
    scores = scores_of(head, text, video, captions)
    found |= partition(head, text, video, captions)
    count = int(case.config.get("recover_captions_supplement", 2))
    weighted, pairwise, several = (
        scores_of(head_of(case, **changes), text, video, captions)
        for changes in (
            {"macro_interaction": "weighted-max"}, {"spot_partition": "pairwise"}, {"recover_captions": count}
        )
    )  # fmt: skip
    every = scores | {f"macro_eq5.{path}": weighted[f"macro.{path}"] for path in ("original", *PATHS)}
    every |= {f"{view}.{path}_pairwise": pairwise[f"{view}.{path}"] for view, path in PAIRS}
    every[f"macro_supp2.recover_{count}_captions"] = several["macro.recover"]
    every[f"micro_supp3.recover_{count}_captions"] = several["micro.recover"]
    scale = given["logit_scale"].exp().reshape(())
    found |= {f"score.{name}": score for name, score in every.items()}
    found |= {f"loss.info_nce.{name}": info_nce(scale * score) for name, score in every.items()}
    # Eq. 1, whose patches are the frames' own, before any merging.
    original = dataclasses.replace(video, patches=given["patches"])
    options = DPDVOptions(macro_interaction="mean", micro_interaction="mean", patch_reduction=EveryPatch())
    means = DPDVHead(text.sentence.shape[1], 32, 12, options)(text, original).parts
    found |= {"score.mean_pool.sentence_frame": means["macro"], "score.mean_pool.word_patch": means["micro"]}
    return found | {"similarity_test": head(text, video).similarity} | losses(case, found, scale)


def scores_of(head, text, video, captions):
    """Return scores (N, M) as `{view}.{original | spot | recover}`."""
    parts = head.matching(text, video, captions)
    original = {f"{view}.original": parts[view] for view in VIEWS}
    return original | {f"{view}.{path}": parts[f"{path}.{view}"] for view, path in PAIRS}


def partition(head, text, video, captions):
    """Return spot and recover frames, captions by rank, and token weights."""
    similarity = torch.einsum("nd,mfd->nmf", unit(text.sentence), unit(video.frames))
    mask = video.frame_mask
    spot, recover = head.partition(text, video)
    cosine, order = caption_order(captions.sentence, captions.mask, video.frames, recover)
    return {
        "sentence_frame_cosine(text,video,frame)": similarity.masked_fill(~mask, 0.0),
        "spot_mask_paired(video,frame)": spot,
        "recover_mask_paired(video,frame)": recover_frames(spot, mask),
        "spot_mask_pairwise(text,video,frame)": spot_frames(
            similarity, mask.expand_as(similarity), head.options.spot_ratio
        ),
        "caption_cosine(video,caption)": cosine,
        "caption_order(video,rank)": order,
        "theta.frame(all frames)": head.macro.prepared("video", video.frames, mask).weights,
        "theta.frame(spot frames)": head.macro.prepared("video", video.frames, spot).weights,
        "theta.word": head.micro.prepared("text", text.words, text.word_mask).weights,
    }


def losses(case, found, scale):
    terms = {}
    for view, path in PAIRS:
        pair = found[f"score.{view}.original"], found[f"score.{view}.{path}"], scale
        rows, columns = view_divergence(*pair, Divergence())
        terms |= {f"loss.kl_rows.{view}.{path}": rows, f"loss.kl_columns.{view}.{path}": columns}
        terms[f"loss.kl.{view}.{path}"] = (rows + columns) / 2
        reverse, helper = Divergence(direction="path-to-original"), Divergence(scores="cosines", reduction="mean")
        terms[f"loss.kl_reverse.{view}.{path}"] = sum(view_divergence(*pair, reverse)) / 2
        terms[f"loss.kl_hbi_helper.{view}.{path}"] = sum(view_divergence(*pair, helper)) / 2
    original, plus, minus = (
        sum(found[f"loss.info_nce.{view}.{path}"] for view in VIEWS) for path in ("original", *PATHS)
    )
    divergence = sum(terms[f"loss.kl.{view}.{path}"] for view, path in PAIRS)
    alpha, beta = float(case.config.get("alpha", 0.5)), float(case.config.get("beta", 0.1))
    total = original + alpha * (plus + minus) + beta * divergence
    named = {"original": original, "plus": plus, "minus": minus, "kl": divergence, "total": total}
    return terms | {f"loss.{name}": loss for name, loss in named.items()}
