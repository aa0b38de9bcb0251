"""CLIP4Clip's checkpoints (ArrowLuo/CLIP4Clip, modules/modeling.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, load
from tvr_lightning.authors.clip import check_positions, clip_encoder, count_blocks, temporal_encoder
from tvr_lightning.layers.temporal import SeqTransf, SimilarityHeader
from tvr_lightning.methods.clip4clip import CLIP4Clip, CLIP4ClipOptions, TightTransf

TIGHT_NAMES = NameMap(
    (
        ("cross.embeddings.position_embeddings.", "cross.position_embeddings."),
        ("cross.transformer.resblocks.", "cross.resblocks."),
        ("cross.pooler.ln_pool.", "cross.ln_pool."),
        ("cross.pooler.dense.", "cross.dense."),
        ("similarity_dense.", "cross.similarity_dense."),
    )
)


def similarity_header(checkpoint: Mapping[str, Tensor]) -> tuple[SimilarityHeader, NameMap]:
    """Return the header that a checkpoint was trained with, and the names of all its tensors."""
    temporal, names = temporal_encoder(checkpoint)
    if any(name.startswith("cross.") for name in checkpoint):
        return TightTransf(count_blocks(checkpoint, "cross.transformer.resblocks.")), names | TIGHT_NAMES
    return temporal, names


def import_clip4clip(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> CLIP4Clip:
    """Build CLIP4Clip from an authors' checkpoint; names and shapes of the tensors determine header and sizes.

    Args:
        checkpoint: Tensors by the authors' names.
        source: Name of the file, for errors.
        words: Text positions W of the method.
        frames: Number of frames F of the method.

    Raises:
        UserError: The method, names, words or frames do not match the checkpoint.
    """
    check_family("clip4clip", checkpoint, source)
    encoder = clip_encoder(checkpoint, source)
    header, names = similarity_header(checkpoint)
    # In TightTransf, the sentence comes before the frames.
    tokens = frames + 1 if isinstance(header, TightTransf) else frames if isinstance(header, SeqTransf) else 0
    check_positions(encoder, source, words, frames, tokens)
    module = CLIP4Clip(encoder, words=words, frames=frames, clip4clip=CLIP4ClipOptions(similarity_header=header))
    return load(module, checkpoint, names, source)
