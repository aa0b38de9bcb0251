"""Choice of the weights of an encoder that are trained, under any method."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, get_args

from typing_extensions import override

from tvr_lightning.encoders.base import Encoder, Tower
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import ConfigVariant, Count, check


class Tuning(ConfigVariant):
    """Choice of the weights of an encoder that are trained. All variants but `Full` replace the encoder's `freeze`."""

    group: Literal["encoder", "tuning"] = "tuning"
    """Parameter group of what is trained: `encoder` learns at `optimizer.encoder_lr`, `tuning` at `optimizer.lr`."""
    trains = True

    @abstractmethod
    def apply(self, encoder: Encoder) -> None:
        """Prepare an encoder for training, in place, with unchanged features."""


class Full(Tuning):
    """Training of the encoder as its `freeze` says, at `optimizer.encoder_lr`."""

    group = "encoder"

    @override
    def apply(self, encoder: Encoder) -> None:
        pass


class Frozen(Tuning):
    """No training of the encoder, only of the method's own layers."""

    trains = False

    @override
    def apply(self, encoder: Encoder) -> None:
        encoder.freeze("all")


class BitFit(Tuning):
    """Training of all biases of the encoder (Ben Zaken et al., ACL 2022), at `optimizer.lr`."""

    @override
    def apply(self, encoder: Encoder) -> None:
        encoder.freeze("all")
        biases = [parameter for name, parameter in encoder.named_parameters() if name.endswith("bias")]
        if not biases:
            raise UserError(f"tuning: BitFit trains biases, but {type(encoder).__name__} has none. Use LoRA.")
        for bias in biases:
            bias.requires_grad_(True)


class LastBlocks(Tuning):
    """Training of the last blocks of each tower, at `optimizer.encoder_lr`, with the norms and projections after them.

    CLIP4Clip's `freeze_layer_num` N is `blocks: 12 - N`.

    Args:
        blocks: number of blocks at the end of each tower that are trained.
    """

    group = "encoder"

    def __init__(self, blocks: Count = 4) -> None:
        self.blocks = blocks
        check(self)

    @override
    def apply(self, encoder: Encoder) -> None:
        encoder.freeze("clip4clip")  # trains the blocks, last norms, and projections
        for tower in get_args(Tower):
            for block in encoder.blocks(tower)[: -self.blocks]:
                block.requires_grad_(False)
