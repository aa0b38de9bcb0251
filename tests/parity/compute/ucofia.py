"""Cases of UCoFiA's training and evaluation codes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from parity.case import CaseError, ParityCase
from torch import Tensor, nn

from tvr_lightning.authors.importer import fixed_sizes
from tvr_lightning.authors.names import PREDICTOR, UCOFIA, load
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import ISA
from tvr_lightning.layers.patch_selector import PatchSelection, PatchSelector, indicators
from tvr_lightning.layers.sinkhorn import sinkhorn_biases
from tvr_lightning.methods.ucofia import UCoFiAHead, UCoFiAOptions
from tvr_lightning.training.losses import info_nce

ALIGNMENTS = ("video_sentence", "sentence_frame", "word_patch")


class _Parts(nn.Module):
    """Head and selector without encoder: what a case from embeddings holds."""

    def __init__(self, case: ParityCase, selection: PatchSelection):
        super().__init__()
        checkpoint, source = case.checkpoint, str(case.path)
        sizes = fixed_sizes(checkpoint)
        dimension = len(checkpoint["global_mat_weight"])
        trains = case.config.get("variant", "train") == "train"
        isa = ISA(1 / float(case.config.get("softmax_temperature", 0.01)))
        options = UCoFiAOptions(patch_selection=selection, similarity_aggregation=isa, patch_matrix=trains)
        self.head = UCoFiAHead(dimension, sizes["words"], sizes["frames"], options)
        self.selector = PatchSelector(dimension, selection)
        # What the temporal encoder gives is an input; the evaluation codes do not read L1.
        unused = ["clip.", "transformerClip.", "frame_position_embeddings."] + ["local_mat_weight1"] * (not trains)
        load(self, checkpoint, {**UCOFIA, **dict.fromkeys(unused)}, source)


def compute_ucofia(case: ParityCase) -> dict[str, Tensor]:
    """Compute selected patches, scores with their released scale, loss, and Sinkhorn-normalised scores of a case.

    Scores are (N, M), the selected patches of all frames in a row (M, F P', D).
    """
    given, checkpoint = case.config, case.checkpoint
    normed, dimension = len(checkpoint[f"{PREDICTOR}in_conv.0.weight"]), len(checkpoint["global_mat_weight"])
    selection = PatchSelection(
        kept=int(given.get("topk", 3)),
        samples=int(given.get("selector_samples", 500)),
        sigma=float(given.get("selector_sigma", 0.05)),
        predictor="train" if normed == dimension else "eval-t2v",
    )
    parts = _Parts(case, selection)
    tokens, words = case.input("tokens"), case.input("words")
    noise = case.input("selector_noise(video*frame,sample,patch)").unflatten(0, tokens.shape[:2])
    cls, patches = tokens[:, :, 0], tokens[:, :, 1:]
    patch_score = parts.selector.scores(cls, patches)
    found = {
        "patch_score(video*frame,patch)": patch_score.flatten(0, 1),
        "selected_patch_index(video*frame,k)": indicators(patch_score, selection.kept).argmax(-1).flatten(0, 1),
    }
    scale = checkpoint["clip.logit_scale"].exp().reshape(())
    text = TextFeatures(case.input("sentence"), words, torch.ones(words.shape[:2], dtype=torch.bool))
    clip_frames = case.input("frame_embeddings")
    frames = clip_frames if given.get("sim_header") == "meanP" else case.input("temporal_frames")
    for name, drawn in (("noise_free", None), ("noise", noise)):
        selected = parts.selector(cls, patches, drawn)
        video = VideoFeatures(frames, case.input("video_mask").bool(), patches=selected, clip_frames=clip_frames)
        scores = parts.head(text, video, scale)
        found[f"selected_tokens.{name}"] = selected.flatten(1, 2)
        found[f"similarity.{name}"] = scale * scores.similarity
        for part, score in scores.parts.items():
            found[f"score.{part}.{name}"] = scale * score
    count = min(len(text), len(video))
    found["loss.noise_free"] = info_nce(found["similarity.noise_free"][:count, :count])
    if "queue_score.word_patch" in case.inputs:
        found |= _sinkhorn_normalised(case, found)
    return found


def _sinkhorn_normalised(case: ParityCase, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The released evaluation: a bias for every test item from each score's training queries, then the mean.

    Text to video the items are the M videos, video to text the N texts; the queries are the rows of `queue_score`.
    """
    biases, corrected = {}, []
    scores = [found[f"score.{part}.noise_free"] for part in ALIGNMENTS]
    side, dimension = ("text", 0) if case.config.get("variant") == "eval_v2t" else ("video", 1)
    for part, score in zip(ALIGNMENTS, scores, strict=True):
        queue = case.input(f"queue_score.{part}")
        if queue.shape[1] != score.shape[dimension]:
            raise CaseError(
                f"{case.path}: input.queue_score.{part} has {queue.shape[1]} columns; expected one per {side} "
                f"({score.shape[dimension]})"
            )
        _, bias = sinkhorn_biases(queue, 1.0, iterations=4)
        biases[f"bias.{part}"] = bias
        corrected.append(score + (bias.unsqueeze(1) if side == "text" else bias))
    return biases | {
        "similarity_sk_normalised": torch.stack(corrected).mean(0),
        "similarity_unnormalised": torch.stack(scores).mean(0),
    }
