"""CLIP4Clip's checkpoints (ArrowLuo/CLIP4Clip, modules/modeling.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, count_blocks, temporal_encoder
from tvr_lightning.methods.clip4clip import CLIP4Clip, SimilarityHeader

TIGHT_NAMES = NameMap(
    (
        ("cross.embeddings.position_embeddings.", "cross.position_embeddings."),
        ("cross.transformer.resblocks.", "cross.resblocks."),
        ("cross.pooler.ln_pool.", "cross.ln_pool."),
        ("cross.pooler.dense.", "cross.dense."),
        ("similarity_dense.", "cross.similarity_dense."),
    )
)


def similarity_header(checkpoint: Mapping[str, Tensor]) -> tuple[SimilarityHeader, int, NameMap]:
    """The header that a checkpoint with these names was trained with, its layers, and the names of all its tensors."""
    temporal, layers, names = temporal_encoder(checkpoint)
    if any(name.startswith("cross.") for name in checkpoint):
        return "tightTransf", count_blocks(checkpoint, "cross.transformer.resblocks."), names | TIGHT_NAMES
    return temporal or "meanP", layers, names


def import_clip4clip(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> CLIP4Clip:
    """Build CLIP4Clip from an authors' checkpoint; header and sizes come from the tensors' names and shapes.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for.

    Raises:
        AuthorsCheckpointError: another method's checkpoint, unexpected or missing names, or words and frames beyond its
            positions.
    """
    check_family("clip4clip", checkpoint, source)
    encoder = clip_encoder(checkpoint, source)
    header, layers, names = similarity_header(checkpoint)
    # The sentence stands before the frames in tightTransf.
    check_positions(encoder, source, words, frames, {"seqTransf": frames, "tightTransf": frames + 1}.get(header, 0))
    module = CLIP4Clip(
        encoder,
        words=words,
        frames=frames,
        similarity_header=header,
        temporal_layers=layers or None,
    )
    return load(module, checkpoint, names, source)
