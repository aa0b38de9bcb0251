"""CLIP and the temporal encoder of an authors' checkpoint, which most released codes take from CLIP4Clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap
from tvr_lightning.encoders.clip import ClipEncoder, openai_sizes
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.errors import UserError
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf, TemporalHeader

CLIP_NAMES = NameMap((("clip.logit_scale", "temperature.logit_scale"), ("clip.", "encoder.clip.")))
"""Names of CLIP's parameters, which are part of every name map."""

TRANSFORMER_NAMES = NameMap(
    (
        ("transformerClip.resblocks.", "temporal.resblocks."),
        ("frame_position_embeddings.", "temporal.frame_position_embeddings."),
    )
)
# The released codes create position embeddings with every temporal encoder; only the transformer uses them.
OTHER_NAMES = NameMap((("lstm_visual.", "temporal.lstm_visual."),), unused=("frame_position_embeddings.",))

RECIPE_ARCHITECTURES = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336")


def clip_encoder(
    checkpoint: Mapping[str, Tensor], source: str, text_mask: bool = False, patch_shift: bool = False
) -> OpenClipEncoder:
    """Build an encoder of any size from the `clip.*` tensors of an authors' checkpoint.

    Args:
        checkpoint: Tensors by the authors' names.
        source: Name of the file, for the error.
        text_mask: Whether to mask padding in the text transformer (GARE, HBI).
        patch_shift: Whether to shift patches between neighboring frames (UCoFiA).

    Raises:
        UserError: The tensors do not belong to an OpenAI CLIP with a vision transformer.
    """
    clip = {name.removeprefix("clip."): t.float() for name, t in checkpoint.items() if name.startswith("clip.")}
    try:
        encoder = ClipEncoder.from_openai_state_dict(clip, text_mask=text_mask, patch_shift=patch_shift)
    except ValueError as error:
        raise UserError(f"{source}: clip.*: {error}") from error
    # The checkpoint contains the temporal layers, possibly more than the text transformer has.
    encoder.temporal_initialization = _no_start  # type: ignore[method-assign]
    return encoder


def _no_start(layers: int) -> None:
    """Return no initialization for the temporal layers; the number of heads is D // 64 as in CLIP."""


def count_blocks(checkpoint: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of transformer blocks with a prefix such as `transformerClip.resblocks.`."""
    return len({name[len(prefix) :].split(".")[0] for name in checkpoint if name.startswith(prefix)})


def temporal_encoder(checkpoint: Mapping[str, Tensor]) -> tuple[TemporalHeader, NameMap]:
    """Return the temporal encoder of a checkpoint, and the names of its and CLIP's parameters."""
    blocks = count_blocks(checkpoint, "transformerClip.resblocks.")
    if blocks:
        return SeqTransf(blocks), CLIP_NAMES | TRANSFORMER_NAMES
    layers = sum(name.startswith("lstm_visual.weight_ih_l") for name in checkpoint)
    return SeqLSTM(layers) if layers else MeanP(), CLIP_NAMES | OTHER_NAMES


def temporal_layers(checkpoint: Mapping[str, Tensor]) -> tuple[int, NameMap]:
    """Return the number of blocks in a checkpoint's temporal transformer (0 without one), and its and CLIP's names."""
    header, names = temporal_encoder(checkpoint)
    return header.blocks if isinstance(header, SeqTransf) else 0, names


def check_positions(encoder: OpenClipEncoder, source: str, words: int, frames: int, tokens: int = 0) -> None:
    """Refuse more words or video tokens than a checkpoint has positions.

    Args:
        encoder: Encoder from the checkpoint; the temporal transformer has the same number of positions.
        source: Name of the file, for the error.
        words: Text positions W.
        frames: Number of frames F.
        tokens: Positions of a video: F, more with tokens before the frames, 0 without position embeddings.

    Raises:
        UserError: The checkpoint has fewer positions; the message contains their number.
    """
    positions = encoder.context_length
    if max(words, tokens) > positions:
        raise UserError(
            f"{source}: {words} words and {frames} frames do not fit; the checkpoint has positions for "
            f"{positions} words" + (f" and {positions - tokens + frames} frames" if tokens else "")
        )


def encoder_configuration(checkpoint: Mapping[str, Tensor], encoder: OpenClipEncoder) -> dict[str, Any]:
    """Return the `encoder:` section of a recipe for the CLIP in a checkpoint.

    OpenAI's architectures have the same name as in recipes, with the weights that the authors started from. Other
    sizes are written explicitly.

    Args:
        checkpoint: Tensors by the authors' names, CLIP's by OpenAI's.
        encoder: Encoder built from the checkpoint.
    """
    switches: dict[str, Any] = {"text_mask": encoder.text_mask, "patch_shift": encoder.patch_shift is not None}
    sizes = openai_sizes({name.removeprefix("clip."): t for name, t in checkpoint.items() if name.startswith("clip.")})
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
            return {
                "class_path": "ClipEncoder",
                "init_args": {"architecture": name, "weights": "openai", **switches},
            }
    return {"class_path": "SizedClipEncoder", "init_args": {**sizes, **switches}}
