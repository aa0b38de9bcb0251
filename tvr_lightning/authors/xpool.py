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
    """Build X-Pool from an authors' checkpoint; every size comes from the tensors' shapes.

    Args:
        checkpoint: tensors by the authors' names, CLIP's by OpenAI's or transformers' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for.

    Raises:
        UserError: another method's checkpoint, unexpected or missing names, or too many words.
    """
    check_family("xpool", checkpoint, source)
    checkpoint = with_openai_names(checkpoint, source)
    encoder = clip_encoder(checkpoint, source)
    check_positions(encoder, source, words, frames)
    module = XPool(encoder, words=words, frames=frames, xpool=XPoolOptions())
    return load(module, checkpoint, CLIP_NAMES | NAMES, source)
