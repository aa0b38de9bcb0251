"""What the authors' cases start from: tokens and pixels through the checkpoint's CLIP, or embeddings as they are."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from parity.case import CaseError, ParityCase
from torch import Tensor, nn

from tvr_lightning.authors.names import Names, load
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods.xpool import XPoolOptions

Head = TypeVar("Head", bound=nn.Module)


def encode_case(case: ParityCase, encoder: Encoder) -> tuple[TextFeatures, VideoFeatures]:
    """Encode the token ids (N, W) and normalised pixels (M, F, 3, S, S) of a case.

    Args:
        case: with `input.input_ids`, `input.text_mask`, `input.video` and `input.video_mask`.
        encoder: of a method that an importer built.

    Raises:
        CaseError: the case lacks an input, or the checkpoint's CLIP takes other sizes.
    """
    clip = cast(OpenClipEncoder, encoder)  # what `clip_encoder` builds
    ids, pixels = case.input("input_ids"), case.input("video")
    text_mask, frame_mask = case.input("text_mask").bool(), case.input("video_mask").bool()
    if ids.shape[1] > encoder.context_length:
        raise CaseError(
            f"{case.path}: input.input_ids has {ids.shape[1]} words, the checkpoint's positional embedding "
            f"{encoder.context_length}"
        )
    try:
        return clip.encode_tokens(ids, text_mask), clip.encode_pixels(pixels, frame_mask)
    except ValueError as error:
        raise CaseError(f"{case.path}: {error}") from error


def first_pairs(text: TextFeatures, video: VideoFeatures) -> PairedFeatures:
    """The first B = min(N, M) texts and videos as matching pairs: what the cases' training losses are about."""
    count = min(len(text), len(video))
    index = torch.arange(count)
    return PairedFeatures(text[:count], video[:count], index, index)


def case_attention(case: ParityCase) -> XPoolOptions:
    """Return the attention that a case's metadata describe, without dropout as in evaluation."""
    return XPoolOptions(heads=int(case.config.get("num_mha_heads", 1)), dropout=0.0)


def embedded(case: ParityCase) -> tuple[TextFeatures, VideoFeatures]:
    """Return the embeddings of a case as features: `text_embedding` (N, D) and `frame_embeddings` (M, F, D)."""
    sentence, frames = case.input("text_embedding"), case.input("frame_embeddings")
    mask = case.inputs.get("video_mask", torch.ones(frames.shape[:2])).bool()
    words = torch.ones(len(sentence), 1, dtype=torch.bool)
    return TextFeatures(sentence, sentence.unsqueeze(1), words), VideoFeatures(frames, mask)


def load_head(head: Head, case: ParityCase, names: Names) -> Head:
    """Give a head the case's checkpoint, apart from CLIP's tensors, and return it in evaluation mode."""
    own = {name: tensor for name, tensor in case.checkpoint.items() if not name.startswith("clip.")}
    load(nn.ModuleDict({"head": head}), own, names, str(case.path))
    return head


def case_scale(case: ParityCase) -> Tensor:
    """Return exp(logit_scale) of a case's checkpoint, scalar.

    Raises:
        CaseError: it has none.
    """
    if "clip.logit_scale" not in case.checkpoint:
        raise CaseError(f"{case.path}: no tensor checkpoint.clip.logit_scale; a {case.method} case needs it")
    return case.checkpoint["clip.logit_scale"].reshape(()).exp()
