"""Compile the blocks of transformers with torch.compile."""

from collections.abc import Iterable

import torch
from torch import nn

from tvr_lightning.errors import UserError

BLOCKS = ("resblocks", "blocks", "layers", "layer", "block")  # lists of blocks in open_clip, timm and transformers


def compile_blocks(towers: Iterable[nn.Module]) -> None:
    """Compile every block of the towers' transformers in place; parameter names stay the same.

    Blocks are compiled separately: they share one compiled graph, and gradient checkpointing and FSDP2 wrap blocks
    too. The first batch triggers compilation. If it fails, for example because there is no compiler, torch logs a
    warning and the blocks run uncompiled.
    """
    torch._dynamo.config.suppress_errors = True
    for tower in towers:
        blocks = blocks_of(tower)
        for block in blocks:
            block.compile()
        if not blocks:
            raise UserError(
                f"compile_towers: {type(tower).__name__} is not a transformer. Set compile_towers to false."
            )


def blocks_of(tower: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer in their order; none if it has no list named as one of blocks."""
    lists: dict[str, nn.Module] = {}
    for name, part in tower.named_modules():
        is_list = name.rpartition(".")[2] in BLOCKS and isinstance(part, nn.ModuleList | nn.Sequential)
        if is_list and not name.startswith(tuple(lists)):  # not a list inside a block
            lists[f"{name}."] = part
    return [block for part in lists.values() for block in part.children()]
