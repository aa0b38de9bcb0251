"""GARE's checkpoints (musicman217/GARE-text-video-retrieval, tvr/models/modeling.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, listed, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, count_blocks, temporal_layers
from tvr_lightning.errors import UserError
from tvr_lightning.methods.gare import GARE, GAREOptions

NAMES = NameMap(
    (
        ("psi.layers.0.cross_attn.", "head.psi."),
        ("psi.layers.0.", "head.psi."),
        ("psi.", "head.psi."),
    ),
    # Created by the released code but never used; the output of log_std_proj is discarded.
    # https://github.com/musicman217/GARE-text-video-retrieval/blob/e42b0e2/tvr/models/modeling.py#L184-L206
    unused=("psi.log_std_proj.", "psi.layers.0.linear2.", "psi.layers.0.mlp.", "weight_fc."),
)


AGENT = "agent.psi."
"""Prefix under which the released code registers psi a second time."""


def without_agent(checkpoint: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return a checkpoint without the duplicate names of psi's tensors.

    Raises:
        UserError: A duplicate differs from the tensor with the first name, or there is no such tensor.
    """
    twins = {name: checkpoint.get(name.removeprefix("agent.")) for name in checkpoint if name.startswith(AGENT)}
    other = [name for name, twin in twins.items() if twin is None or not torch.equal(twin, checkpoint[name])]
    if other:
        raise UserError(
            f"{source}: these tensors differ from those without 'agent.', although the released code saves one tensor "
            f"under both names: {listed(other)}"
        )
    return {name: tensor for name, tensor in checkpoint.items() if name not in twins}


def import_gare(
    checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12, gare: GAREOptions | None = None
) -> GARE:
    """Build GARE from an authors' checkpoint; arguments provide what the shapes do not determine.

    Args:
        checkpoint: Tensors by the authors' names.
        source: Name of the file, for errors.
        words: Text positions W of the method.
        frames: Number of frames F of the method.
        gare: Options; the checkpoint determines `temporal_layers`.

    Raises:
        UserError: The method, names, words or frames do not match the checkpoint, or psi has more than one layer.
    """
    check_family("gare", checkpoint, source)
    checkpoint = without_agent(checkpoint, source)
    layers = count_blocks(checkpoint, "psi.layers.")
    if layers != 1:
        raise UserError(f"{source}: psi has {layers} layers; GARE's psi has one (Eq. 7)")
    encoder = clip_encoder(checkpoint, source, text_mask=True)
    layers, names = temporal_layers(checkpoint)  # 0 for MSVD
    check_positions(encoder, source, words, frames, frames if layers else 0)
    options = dataclasses.replace(gare or GAREOptions(), temporal_layers=layers)
    return load(GARE(encoder, words=words, frames=frames, gare=options), checkpoint, names | NAMES, source)
