"""Cases of DRL: every interaction and all decorrelation losses, from tokens."""

from __future__ import annotations

import torch
from parity.case import CaseError, ParityCase
from parity.compute.features import case_scale, load_head
from torch import Tensor

from tvr_lightning.authors import names
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.drl import (
    DecorrelationTokens,
    DotProduct,
    DRLHead,
    DRLInteraction,
    TokenWise,
    WeightedTokenWise,
    decorrelation_sums,
    token_correlation,
)
from tvr_lightning.training.losses import info_nce

CDCR: dict[int, DecorrelationTokens] = {2: "matched", 3: "weighted"}


def _heads(case: ParityCase) -> dict[str, DRLHead]:
    """A head for every interaction; WTI's only where the case has its weights."""
    dimension = case.input("words").shape[-1]
    layers = sum(name.startswith("text_weight_fc.") and name.endswith("weight") for name in case.checkpoint)
    plain: dict[str, DRLInteraction] = {"ti": TokenWise(), "dp": DotProduct()}
    heads = {name: DRLHead(dimension, interaction) for name, interaction in plain.items()}
    if layers:
        heads["wti"] = load_head(DRLHead(dimension, WeightedTokenWise(layers)), case, names.DRL)
    return heads


def compute_drl(case: ParityCase) -> dict[str, Tensor]:
    """Compute scores (B, B) of every interaction, weights and losses of a DRL case from tokens of B pairs."""
    words, frames = case.input("words"), case.input("frames")
    text = TextFeatures(words[:, 0], words, case.input("text_mask").bool())
    video = VideoFeatures(frames, case.input("video_mask").bool())
    heads = _heads(case)
    found = {f"similarity.{name}": head(text, video).similarity for name, head in heads.items()}
    head = heads["wti" if "wti" in heads else "ti"]
    own_words, own_frames = head.prepare(text, video)
    trained = str(case.config.get("interaction", "wti"))
    if trained not in heads:
        raise CaseError(f"{case.path}: interaction {trained!r} without its weights; expected {', '.join(heads)}")
    scaled = case_scale(case) * found[f"similarity.{trained}"]
    found |= {
        "text_weight": own_words.weights,
        "video_weight": own_frames.weights,
        "train.scaled_similarity": scaled,
        "loss.similarity": info_nce(scaled),
    }
    first, second = (float(case.config.get(f"cdcr_alpha{i}", default)) for i, default in ((1, 1.0), (2, 0.06)))
    weight = float(case.config.get("cdcr_lambda", 0.001))
    for number, correlation in _correlations(case, head, text, video).items():
        on_diagonal, off_diagonal = decorrelation_sums(correlation)
        total = first * on_diagonal + second * off_diagonal
        found |= {
            f"loss.cdcr{number}.on_diagonal": on_diagonal,
            f"loss.cdcr{number}.off_diagonal": off_diagonal,
            f"loss.cdcr{number}.alpha_{first:g}_{second:g}": total,
            f"loss.total_cdcr{number}_lambda_{weight:g}": found["loss.similarity"] + weight * total,
        }
    return found


def _correlations(case: ParityCase, head: DRLHead, text: TextFeatures, video: VideoFeatures) -> dict[int, Tensor]:
    """Channel correlations (D, D) by the released number; the case says which tokens were drawn for number 1."""
    numbers = (2, 3) if isinstance(head.interaction, WeightedTokenWise) else (2,)
    found = {number: head.correlations(text, video, CDCR[number]) for number in numbers}
    if "cdcr1_text_index" in case.inputs:
        words, frames = head.prepare(text, video)
        word = torch.remainder(case.input("cdcr1_text_index"), words.mask.sum(1))
        frame = torch.remainder(case.input("cdcr1_video_index"), frames.mask.sum(1))
        found[1] = token_correlation(words, frames, word, frame)
    if any(correlation is None for correlation in found.values()):
        raise CaseError(f"{case.path}: a single pair or token has no variance; give at least two texts and videos")
    return {number: correlation for number, correlation in found.items() if correlation is not None}
