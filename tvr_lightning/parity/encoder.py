"""The CLIP inside an authors' checkpoint: building it, and naming the architecture a recipe knows it by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.clip import ClipEncoder
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.parity.case import ParityCase, ParityError

CLIP_NAMES = (("clip.logit_scale", "temperature.logit_scale"), ("clip.", "encoder.clip."))
"""The part of every CLIP4Clip descendant's name map that concerns CLIP."""

RECIPE_ARCHITECTURES = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336")


def clip_encoder(checkpoint: Mapping[str, Tensor], source: str, text_mask: bool = False) -> OpenClipEncoder:
    """Build the encoder from the `clip.*` tensors of an authors' checkpoint, of any size.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for the error.
        text_mask: mask padding in the text transformer (GARE, HBI).

    Raises:
        ParityError: these are not the tensors of an OpenAI CLIP with a vision transformer.
    """
    clip = {name.removeprefix("clip."): t.float() for name, t in checkpoint.items() if name.startswith("clip.")}
    try:
        encoder = ClipEncoder.from_openai_state_dict(clip, text_mask=text_mask)
    except ValueError as error:
        raise ParityError(f"{source}: clip.*: {error}") from error
    # The checkpoint brings the temporal layers itself, and they may be more than the text transformer has.
    encoder.temporal_initialization = _no_start  # type: ignore[method-assign]
    return encoder


def _no_start(layers: int) -> None:
    """Stand in for an encoder's start of the temporal layers: there is none, heads are D // 64 as in CLIP."""


def clip_sizes(checkpoint: Mapping[str, Tensor]) -> dict[str, int]:
    """Sizes of the CLIP in a checkpoint that `clip_encoder` accepts: plain numbers, by name."""
    vision, _, patch, _ = checkpoint["clip.visual.conv1.weight"].shape
    context, text = checkpoint["clip.positional_embedding"].shape
    side = int((checkpoint["clip.visual.positional_embedding"].shape[0] - 1) ** 0.5 + 0.5)
    return {
        "dimension": checkpoint["clip.text_projection"].shape[1],
        "vision_width": vision,
        "vision_layers": count_blocks(checkpoint, "clip.visual.transformer.resblocks."),
        "patch_size": patch,
        "image_size": side * patch,
        "text_width": text,
        "text_layers": count_blocks(checkpoint, "clip.transformer.resblocks."),
        "context_length": context,
        "vocabulary": checkpoint["clip.token_embedding.weight"].shape[0],
    }


def count_blocks(checkpoint: Mapping[str, Tensor], prefix: str) -> int:
    """Number of transformer blocks below `prefix`, such as `transformerClip.resblocks.`."""
    return len({name[len(prefix) :].split(".")[0] for name in checkpoint if name.startswith(prefix)})


def encoder_configuration(checkpoint: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """What a recipe writes below `encoder:` for the CLIP in a checkpoint; None where no architecture has its sizes.

    The name ends in `-quickgelu` and the weights are `none`: the checkpoint brings the weights, and without OpenAI's
    file nothing else says that they want QuickGELU.
    """
    sizes = clip_sizes(checkpoint)
    for name in RECIPE_ARCHITECTURES:
        known = model_configuration(name)
        vision, text = known["vision_cfg"], known["text_cfg"]
        if sizes == {
            "dimension": known["embed_dim"],
            "vision_width": vision["width"],
            "vision_layers": vision["layers"],
            "patch_size": vision["patch_size"],
            "image_size": vision["image_size"],
            "text_width": text["width"],
            "text_layers": text["layers"],
            "context_length": text["context_length"],
            "vocabulary": text["vocab_size"],
        }:
            return {"class_path": "ClipEncoder", "init_args": {"architecture": f"{name}-quickgelu", "weights": "none"}}
    return None


def encode_case(case: ParityCase, encoder: Encoder) -> tuple[TextFeatures, VideoFeatures]:
    """Encode the token ids (N, W) and normalised pixels (M, F, 3, S, S) of a case.

    Args:
        case: with `input.input_ids`, `input.text_mask`, `input.video` and `input.video_mask`.
        encoder: of a method that an importer built.

    Raises:
        ParityError: the case lacks an input, or the checkpoint's CLIP takes other sizes.
    """
    clip = cast(OpenClipEncoder, encoder)  # what `clip_encoder` builds
    ids, pixels = case.input("input_ids"), case.input("video")
    text_mask, frame_mask = case.input("text_mask").bool(), case.input("video_mask").bool()
    if ids.shape[1] > encoder.context_length:
        raise ParityError(
            f"{case.path}: input.input_ids has {ids.shape[1]} words, the checkpoint's positional embedding "
            f"{encoder.context_length}"
        )
    try:
        return clip.encode_tokens(ids, text_mask), clip.encode_pixels(pixels, frame_mask)
    except ValueError as error:
        raise ParityError(f"{case.path}: {error}") from error


def first_pairs(text: TextFeatures, video: VideoFeatures) -> PairedFeatures:
    """The first B = min(N, M) texts and videos as matching pairs: what the cases' training losses are about."""
    count = min(len(text), len(video))
    index = torch.arange(count)
    return PairedFeatures(text[:count], video[:count], index, index)
