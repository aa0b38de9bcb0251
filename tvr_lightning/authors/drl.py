"""DRL's checkpoints (foolwood/DRL, tvr/models/modeling.py) and parity cases."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tvr_lightning.authors.checkpoint import NameMap, check_family, rename
from tvr_lightning.authors.clip import CLIP_NAMES, clip_encoder, count_blocks
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.drl import (
    DRL,
    DecorrelationTokens,
    DRLHead,
    Interaction,
    TemporalEncoder,
    decorrelation_sums,
)
from tvr_lightning.parity.case import ParityCase, ParityError
from tvr_lightning.training.losses import info_nce

HEAD_NAMES = (("text_weight_fc.", "head.word_weights."), ("video_weight_fc.", "head.frame_weights."))
NAMES = NameMap(
    (
        *CLIP_NAMES,
        *HEAD_NAMES,
        ("transformerClip.resblocks.", "temporal.resblocks."),
        ("frame_position_embeddings.", "temporal.frame_position_embeddings."),
        ("lstm_visual.", "temporal.lstm_visual."),
    )
)
INTERACTIONS: tuple[Interaction, ...] = ("wti", "ti", "dp")
CDCR: dict[int, DecorrelationTokens] = {2: "matched", 3: "weighted"}


def _weight_layers(checkpoint: Mapping[str, Tensor]) -> int:
    """Linear layers of the weighting networks (the released wti_arch)."""
    return sum(name.startswith("text_weight_fc.") and name.endswith("weight") for name in checkpoint)


def import_drl(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> DRL:
    """Build DRL with WTI from an authors' checkpoint; its sizes come from the tensors' shapes.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for.

    Raises:
        ParityError: another method's checkpoint, unexpected or missing names, or words and frames beyond its positions.
    """
    check_family("drl", checkpoint, source)
    encoder = clip_encoder(checkpoint, source)
    blocks = count_blocks(checkpoint, "transformerClip.resblocks.")
    lstm = sum(name.startswith("lstm_visual.weight_ih_l") for name in checkpoint)
    temporal: TemporalEncoder = "seqTransf" if blocks else "seqLSTM" if lstm else "none"
    if words > encoder.context_length or (blocks and frames > encoder.context_length):
        raise ParityError(
            f"{source}: {words} words and {frames} frames do not fit its {encoder.context_length} text positions"
        )
    names = NAMES
    if not blocks:
        prefixes = tuple(pair for pair in NAMES.prefixes if pair[0] != "frame_position_embeddings.")
        names = NameMap(prefixes, unused=("frame_position_embeddings.",))
    module = DRL(
        encoder,
        words=words,
        frames=frames,
        weight_layers=_weight_layers(checkpoint),
        temporal_encoder=temporal,
        temporal_layers=blocks or lstm or None,
    )
    module.load_state_dict(rename(checkpoint, names, module.state_dict(), source))
    return module.eval()


def _head(case: ParityCase, interaction: Interaction) -> DRLHead:
    dimension = case.input("words").shape[-1]
    if interaction != "wti":
        return DRLHead(dimension, interaction)
    head = nn.Module()
    head.head = DRLHead(dimension, interaction, _weight_layers(case.checkpoint))
    weights = {name: tensor for name, tensor in case.checkpoint.items() if not name.startswith("clip.")}
    head.load_state_dict(rename(weights, NameMap(HEAD_NAMES), head.state_dict(), str(case.path)))
    return head.head.eval()


def compute_drl(case: ParityCase) -> dict[str, Tensor]:
    """Compute scores (B, B) of every interaction, weights and losses of a DRL case from tokens of B pairs."""
    words, frames = case.input("words"), case.input("frames")
    text = TextFeatures(words[:, 0], words, case.input("text_mask").bool())
    video = VideoFeatures(frames, case.input("video_mask").bool())
    if "clip.logit_scale" not in case.checkpoint:
        raise ParityError(f"{case.path}: no tensor checkpoint.clip.logit_scale, which the scaled scores need")
    learnt = _weight_layers(case.checkpoint) > 0
    heads = {name: _head(case, name) for name in INTERACTIONS if learnt or name != "wti"}
    found = {f"similarity.{name}": head(text, video).similarity for name, head in heads.items()}
    head = heads["wti" if learnt else "ti"]
    trained = str(case.config.get("interaction", "wti"))
    if trained not in heads:
        raise ParityError(f"{case.path}: interaction {trained!r} without its weights; expected {', '.join(heads)}")
    scaled = case.checkpoint["clip.logit_scale"].exp().squeeze() * found[f"similarity.{trained}"]
    found |= {
        "text_weight": head.prepare_words(text).weights,
        "video_weight": head.prepare_frames(video).weights,
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
    numbers = (2, 3) if head.interaction == "wti" else (2,)
    found = {number: head.correlations(text, video, CDCR[number]) for number in numbers}
    if "cdcr1_text_index" in case.inputs:
        words, frames = head.prepare_words(text), head.prepare_frames(video)
        word = torch.remainder(case.input("cdcr1_text_index"), words.mask.sum(1))
        frame = torch.remainder(case.input("cdcr1_video_index"), frames.mask.sum(1))
        found[1] = head.token_correlation(words, frames, word, frame)
    if any(correlation is None for correlation in found.values()):
        raise ParityError(f"{case.path}: a single pair or token has no variance; give at least two texts and videos")
    return {number: correlation for number, correlation in found.items() if correlation is not None}
