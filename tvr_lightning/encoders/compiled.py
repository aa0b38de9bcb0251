"""torch.compile for the blocks of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

BLOCKS = ("resblocks", "blocks", "layers", "layer", "block")


def compile_blocks(towers: Iterable[nn.Module]) -> None:
    """Compile every block of the towers' transformers in place; names of parameters stay as they are.

    Block by block: they share one compiled graph, and gradient checkpointing and FSDP2 wrap blocks too. Compiling
    happens as the first batch comes. Where it fails, for want of a compiler or by a fault of it, one line says so and
    the blocks run as they are.

    Args:
        towers: modules that hold their blocks in lists of the names that open_clip, timm and transformers use.

    Raises:
        ValueError: a tower has none.
    """
    compiler = _Compiler()
    for tower in towers:
        lists = [
            (f"{name}.", part)
            for name, part in tower.named_modules()
            if name.rpartition(".")[2] in BLOCKS and isinstance(part, nn.ModuleList | nn.Sequential)
        ]
        if not lists:
            raise ValueError(
                f"compile_towers: {type(tower).__name__} is not a transformer. Set compile_towers to false."
            )
        for name, blocks in lists:
            if any(name != outer and name.startswith(outer) for outer, _ in lists):
                continue  # a list within a block
            for block in blocks:
                # As nn.Module.compile keeps it, which would let the compiler's error end the run.
                block._compiled_call_impl = compiler.compiled(block._call_impl)


class _Compiler:
    """Compiles what it is given, until that has failed once."""

    def __init__(self) -> None:
        self.failed = False

    def compiled(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function compiled at its first call, or as it is where compiling fails."""
        compiled = torch.compile(plain)

        def call(*arguments: Any, **named: Any) -> Any:
            if self.failed:
                return plain(*arguments, **named)
            try:
                return compiled(*arguments, **named)
            except torch._dynamo.exc.TorchDynamoException as error:  # before anything of the block has run
                self.failed = True
                reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                logger.warning("compile_towers: torch.compile failed (%s); the towers run uncompiled", reason)
                return plain(*arguments, **named)

        return call
