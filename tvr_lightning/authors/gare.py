"""GARE's checkpoints (musicman217/GARE-text-video-retrieval, tvr/models/modeling.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import AuthorsCheckpointError, NameMap, check_family, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, count_blocks, temporal_layers
from tvr_lightning.methods.gare import GARE, GAREOptions

NAMES = NameMap(
    (
        ("psi.layers.0.cross_attn.", "head.psi."),
        ("psi.layers.0.", "head.psi."),
        ("psi.", "head.psi."),
    ),
    # Created by the released code and never used; the output of log_std_proj is thrown away.
    # https://github.com/musicman217/GARE-text-video-retrieval/blob/e42b0e2/tvr/models/modeling.py#L184-L206
    unused=("psi.log_std_proj.", "psi.layers.0.linear2.", "psi.layers.0.mlp.", "weight_fc."),
)


def import_gare(
    checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12, gare: GAREOptions | None = None
) -> GARE:
    """Build GARE from an authors' checkpoint; what shapes do not tell comes as arguments.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for.
        gare: options; `temporal_layers` is what the checkpoint has.

    Raises:
        AuthorsCheckpointError: another method's checkpoint, unexpected or missing names, more than one layer in psi, or
            words and frames beyond its positions.
    """
    check_family("gare", checkpoint, source)
    layers = count_blocks(checkpoint, "psi.layers.")
    if layers != 1:
        raise AuthorsCheckpointError(f"{source}: psi has {layers} layers; GARE's psi has one (Eq. 7)")
    encoder = clip_encoder(checkpoint, source, text_mask=True)
    layers, names = temporal_layers(checkpoint)  # none for MSVD
    check_positions(encoder, source, words, frames, frames if layers else 0)
    options = dataclasses.replace(gare or GAREOptions(), temporal_layers=layers)
    return load(GARE(encoder, words=words, frames=frames, gare=options), checkpoint, names | NAMES, source)
