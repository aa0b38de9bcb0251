"""DRL's checkpoints (foolwood/DRL, tvr/models/modeling.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, temporal_encoder
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.methods.drl import DRL, DRLOptions, WeightedTokenWise

NAMES = NameMap((("text_weight_fc.", "head.word_weights."), ("video_weight_fc.", "head.frame_weights.")))


def weight_layers(checkpoint: Mapping[str, Tensor]) -> int:
    """Return the number of linear layers in the weighting networks (the released wti_arch)."""
    return sum(name.startswith("text_weight_fc.") and name.endswith("weight") for name in checkpoint)


def import_drl(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> DRL:
    """Build DRL with WTI from an authors' checkpoint; the shapes of the tensors determine its sizes.

    Args:
        checkpoint: Tensors by the authors' names.
        source: Name of the file, for errors.
        words: Text positions W of the method.
        frames: Number of frames F of the method.

    Raises:
        UserError: The method, names, words or frames do not match the checkpoint.
    """
    check_family("drl", checkpoint, source)
    encoder = clip_encoder(checkpoint, source)
    temporal, names = temporal_encoder(checkpoint)
    check_positions(encoder, source, words, frames, frames if isinstance(temporal, SeqTransf) else 0)
    interaction = WeightedTokenWise(weight_layers(checkpoint))
    module = DRL(
        encoder, words=words, frames=frames, drl=DRLOptions(interaction=interaction, temporal_encoder=temporal)
    )
    return load(module, checkpoint, names | NAMES, source)
