"""T-MASS's checkpoints (Jiamian-Wang/T-MASS-text-video-retrieval, model/clip_stochastic.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, load
from tvr_lightning.authors.clip import CLIP_NAMES, check_positions, clip_encoder
from tvr_lightning.authors.huggingface import with_openai_names
from tvr_lightning.errors import UserError
from tvr_lightning.methods.tmass import TMASS, TMASSOptions

UNUSED = ("stochastic.std_branch.learnable_scalar",)
NAMES = NameMap(
    (
        ("pool_frames.", "head.attention."),
        ("stochastic.std_branch.linear_proj.", "head.radius.linear_proj."),
    ),
    UNUSED,
)


def import_tmass(checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12) -> TMASS:
    """Build T-MASS from an authors' checkpoint; the shapes of the tensors determine all sizes.

    Args:
        checkpoint: Tensors by the authors' names, CLIP's by OpenAI's or transformers' names.
        source: Name of the file, for errors.
        words: Text positions W of the method.
        frames: Number of frames F of the method, fixed by the checkpoint's layer of the radius, (D, F).

    Raises:
        UserError: The method, names or frames do not match the checkpoint, or there are too many words.
    """
    check_family("tmass", checkpoint, source)
    checkpoint = with_openai_names(checkpoint, source)
    check_frames(checkpoint, frames, source)
    encoder = clip_encoder(checkpoint, source)
    check_positions(encoder, source, words, frames)
    module = TMASS(encoder, words=words, frames=frames, tmass=TMASSOptions())
    return load(module, checkpoint, CLIP_NAMES | NAMES, source)


def check_frames(checkpoint: Mapping[str, Tensor], frames: int, source: str) -> None:
    """Refuse a number of frames that differs from the inputs of the layer from similarities to radius, (D, F).

    Raises:
        UserError: The numbers differ; the message contains the expected one.
    """
    layer = checkpoint.get("stochastic.std_branch.linear_proj.weight")
    if layer is not None and layer.shape[1] != frames:
        raise UserError(
            f"{source}: its radius is for {layer.shape[1]} frames, not {frames}. Pass --frames {layer.shape[1]}"
        )
