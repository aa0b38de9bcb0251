"""Patch shift between neighboring frames before attention (TS2-Net, Liu et al., ECCV 2022; UCoFiA)."""

from typing import Any

from open_clip.transformer import ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn

from tvr_lightning.errors import UserError

BLOCKS = slice(10, 12)
"""Blocks of the vision transformer whose attention uses shifted patches (UCoFiA, modules/until_module.py)."""
DIVISOR = 7


class PatchShift:
    """Forward hook of the norms before the shifted attentions; the residual branch keeps its own tokens."""

    def __init__(self, visual: nn.Module, name: str) -> None:
        self.frames = 1  # per video in the next tokens, including padded ones
        blocks = list(visual.transformer.resblocks) if isinstance(visual, VisionTransformer) else []
        tokens = visual.positional_embedding.shape[0] if isinstance(visual, VisionTransformer) else 0
        shifted = blocks[BLOCKS]
        if not shifted or tokens < DIVISOR or not all(type(block) is ResidualAttentionBlock for block in shifted):
            raise UserError(
                f"encoder.patch_shift needs a CLIP vision transformer of at least {BLOCKS.start + 1} blocks and "
                f"{DIVISOR} tokens per frame, which {name} does not have. Set it to false."
            )
        self.transformer: Any = visual.transformer
        for block in shifted:
            block.ln_1.register_forward_hook(self)

    def __call__(self, module: nn.Module, arguments: Any, tokens: Tensor) -> Tensor:
        """Return the shifted tokens, with the same shape."""
        if self.transformer.batch_first:
            return shift_patches(tokens, self.frames)
        return shift_patches(tokens.transpose(0, 1), self.frames).transpose(0, 1)


def shift_patches(tokens: Tensor, frames: int) -> Tensor:
    """Replace some patches of tokens (M F, L, width) by those of the neighboring frames.

    With a step of L // 7, tokens 1, 1 + step, ... come from the previous frame and 4, 4 + step, ... from the next.
    """
    clips = tokens.unflatten(0, (-1, frames))
    step = tokens.shape[1] // DIVISOR
    shifted = clips.clone()
    shifted[:, 1:, 1::step] = clips[:, :-1, 1::step]
    shifted[:, :-1, 4::step] = clips[:, 1:, 4::step]
    return shifted.flatten(0, 1)
