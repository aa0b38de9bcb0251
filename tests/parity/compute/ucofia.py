"""Cases of UCoFiA's training and evaluation codes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from parity.case import ParityCase
from torch import Tensor, nn

from tvr_lightning.authors.checkpoint import NameMap, load
from tvr_lightning.authors.ucofia import NAMES, matrix_sizes, predictor
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.patch_selector import PatchSelectionConfig, PatchSelector, indicators
from tvr_lightning.layers.sinkhorn import LogSumExp, sinkhorn_log_weights
from tvr_lightning.methods.ucofia import UCoFiAHead
from tvr_lightning.training.losses import info_nce

ALIGNMENTS = ("video_sentence", "sentence_frame", "word_patch")


class _Parts(nn.Module):
    """Head and selector without encoder: what a case from embeddings holds."""

    def __init__(self, checkpoint: Mapping[str, Tensor], source: str, config: PatchSelectionConfig, trains: bool):
        super().__init__()
        words, frames, patches = matrix_sizes(checkpoint, source)
        dimension = len(checkpoint["global_mat_weight"])
        self.head = UCoFiAHead(dimension, words, frames, patches, patch_matrix=trains)
        self.selector = PatchSelector(dimension, config)
        unused = ("clip.",) if trains else ("clip.", "local_mat_weight1")
        load(self, checkpoint, NAMES | NameMap((), unused), source)


def compute_ucofia(case: ParityCase) -> dict[str, Tensor]:
    """Compute selected patches, scores with their released scale, loss, and Sinkhorn-normalised scores of a case.

    Scores are (N, M), the selected patches of all frames in a row (M, F P', D).
    """
    given, checkpoint = case.config, case.checkpoint
    trains = str(given.get("variant", "train")) == "train"
    selection = PatchSelectionConfig(
        kept=int(given.get("topk", 3)),
        samples=int(given.get("selector_samples", 500)),
        sigma=float(given.get("selector_sigma", 0.05)),
        predictor=predictor(checkpoint),
    )
    parts = _Parts(checkpoint, str(case.path), selection, trains)
    tokens = case.input("tokens")
    noise = case.input("selector_noise(video*frame,sample,patch)").unflatten(0, tokens.shape[:2])
    cls, patches = tokens[:, :, 0], tokens[:, :, 1:]
    patch_score = parts.selector.scores(cls, patches)
    found = {
        "patch_score(video*frame,patch)": patch_score.flatten(0, 1),
        "selected_patch_index(video*frame,k)": indicators(patch_score, selection.kept).argmax(-1).flatten(0, 1),
    }
    scale = checkpoint["clip.logit_scale"].exp().reshape(())
    words = case.input("words")
    text = TextFeatures(case.input("sentence"), words, torch.ones(words.shape[:2], dtype=torch.bool))
    for name, drawn in (("noise_free", None), ("noise", noise)):
        selected = parts.selector(cls, patches, drawn)
        video = VideoFeatures(
            case.input("temporal_frames"),
            case.input("video_mask").bool(),
            patches=selected,
            clip_frames=case.input("frame_embeddings"),
        )
        scores = parts.head(text, video, scale)
        found[f"selected_tokens.{name}"] = selected.flatten(1, 2)
        found[f"similarity.{name}"] = scale * scores.similarity
        for part, score in scores.parts.items():
            found[f"score.{part}.{name}"] = score if part == "word_patch" else scale * score
    count = min(found["similarity.noise_free"].shape)
    found["loss.noise_free"] = info_nce(found["similarity.noise_free"][:count, :count])
    if "queue_score.word_patch" in case.inputs:
        found |= _sinkhorn_normalised(case, found)
    return found


def _sinkhorn_normalised(case: ParityCase, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The released evaluation: a bias for every test item from each score's training queries, then the mean."""
    biases, corrected = {}, []
    for part in ALIGNMENTS:
        queue = case.input(f"queue_score.{part}")
        _, biases[f"bias.{part}"] = sinkhorn_log_weights(*_log_sums(queue), iterations=4)
        corrected.append(found[f"score.{part}.noise_free"] + biases[f"bias.{part}"])
    plain = torch.stack([found[f"score.{part}.noise_free"] for part in ALIGNMENTS]).mean(0)
    return biases | {
        "similarity_sk_normalised": torch.stack(corrected).mean(0),
        "similarity_unnormalised": plain,
    }


def _log_sums(scores: Tensor) -> tuple[LogSumExp, LogSumExp]:
    def rows(weights: Tensor | None) -> Tensor:
        return (scores if weights is None else scores + weights).logsumexp(1)

    def columns(weights: Tensor | None) -> Tensor:
        return (scores if weights is None else scores + weights.unsqueeze(1)).logsumexp(0)

    return rows, columns
