"""Compile the blocks of transformers with torch.compile."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tvr_lightning.errors import UserError

logger = logging.getLogger(__name__)

BLOCKS = ("resblocks", "blocks", "layers", "layer", "block")  # lists of blocks in open_clip, timm and transformers


def compile_blocks(towers: Iterable[nn.Module]) -> None:
    """Compile every block of the towers' transformers in place; parameter names stay the same.

    Blocks are compiled separately: they share one compiled graph, and gradient checkpointing and FSDP2 wrap blocks
    too. The first batch triggers compilation. If it fails, for example because there is no compiler, a warning is
    logged and the blocks run uncompiled.
    """
    compiled = _compiler()
    for tower in towers:
        blocks = blocks_of(tower)
        for block in blocks:
            # Same attribute as nn.Module.compile, which would let the compiler's error end the run.
            block._compiled_call_impl = compiled(block._call_impl)
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


def _compiler() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a torch.compile whose functions all run uncompiled after the first failure."""
    failed = False

    def compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
        fast = torch.compile(plain)

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal failed
            if not failed:
                try:
                    return fast(*arguments, **named)
                except torch._dynamo.exc.TorchDynamoException as error:  # raised before any code of the block has run
                    failed = True
                    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                    logger.warning("compile_towers: torch.compile failed (%s); the towers run uncompiled", reason)
            return plain(*arguments, **named)

        return call

    return compiled
