"""X-Pool's checkpoints (layer6ai-labs/xpool, model/clip_transformer.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, load
from tvr_lightning.authors.clip import CLIP_NAMES, check_positions, clip_encoder
from tvr_lightning.authors.huggingface import with_openai_names
from tvr_lightning.methods.xpool import XPool, XPoolOptions

NAMES = NameMap((("pool_frames.", "head.attention."),))


def import_xpool(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> XPool:
    """Build X-Pool from an authors' checkpoint; the shapes of the tensors determine all sizes.

    Args:
        checkpoint: Tensors by the authors' names, CLIP's by OpenAI's or transformers' names.
        source: Name of the file, for errors.
        words: Text positions W of the method.
        frames: Number of frames F of the method.

    Raises:
        UserError: The method or names do not match the checkpoint, or there are too many words.
    """
    check_family("xpool", checkpoint, source)
    checkpoint = with_openai_names(checkpoint, source)
    encoder = clip_encoder(checkpoint, source)
    check_positions(encoder, source, words, frames)
    module = XPool(encoder, words=words, frames=frames, xpool=XPoolOptions())
    return load(module, checkpoint, CLIP_NAMES | NAMES, source)
