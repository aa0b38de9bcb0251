"""Cases of GAID's head: gates, both protocols, and the training step."""

from __future__ import annotations

import dataclasses

from parity.case import ParityCase
from parity.compute.features import case_attention, case_scale, embedded, load_head
from parity.compute.tmass import WEIGHTED
from torch import Tensor
from torch.nn import functional as F

from tvr_lightning.authors.families import gaid_options
from tvr_lightning.authors.names import GAID
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.gaid.model import GAIDHead, branch_losses
from tvr_lightning.methods.tmass import score_as_released


def compute_gaid(case: ParityCase) -> dict[str, Tensor]:
    """Compute gates, both protocols' scores and the training step of a GAID case.

    Its audio vectors (M, T, D_a) are pooled to the frames as released, each video's own caption is that of its number.
    """
    text, video = embedded(case)
    dimension, frames = video.frames.shape[2], video.frames.shape[1]
    audio = case.input("audio_features")
    if "linear.weight" in case.checkpoint:
        audio = F.linear(audio, case.checkpoint.pop("linear.weight"), case.checkpoint.pop("linear.bias"))
    video.audio = F.adaptive_avg_pool1d(audio.mT, frames).mT
    head = GAIDHead(dimension, frames, dataclasses.replace(gaid_options(), attention=case_attention(case)))
    load_head(head, case, GAID)
    assert head.gate is not None
    by_video, by_text = head.gate.of_video(video), head.gate.of_text(text.sentence)
    count = min(len(text), len(video))
    found = {
        "gate_paired": (by_video[:count] + by_text[:count].unsqueeze(1)).sigmoid().squeeze(-1),
        "gate_pairwise": (by_video.squeeze(-1) + by_text.unsqueeze(1)).sigmoid(),
        "similarity_as_released": score_as_released(head, text, video, text[: len(video)], None).similarity,
        "similarity_query_conditioned": head(text, video).similarity,
    }
    return found | (_training(case, head, text[:count], video[:count]) if "sigma" in case.inputs else {})


def _training(case: ParityCase, head: GAIDHead, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
    scale = case_scale(case)
    cosines = head.train_cosines(text, video, case.input("sigma")[: len(text)])
    perturbation, support = branch_losses(cosines, scale, "released")
    totals = {name: perturbation + support * float(name[len(WEIGHTED) :]) for name in case.expected if WEIGHTED in name}
    return {
        "train.similarity": cosines[0],
        "train.support_similarity": cosines[1],
        "loss.perturbation": perturbation,
        "loss.support": support,
        **totals,
    }
