"""torch.compile for the blocks of transformers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn

from tvr_lightning.errors import UserError

BLOCKS = ("resblocks", "blocks", "layers", "layer", "block")


class CompilerError(UserError, RuntimeError):
    """Compilation is wanted where there is no compiler."""


def compile_blocks(towers: Iterable[nn.Module]) -> None:
    """Compile every block of the towers' transformers in place; names of parameters stay as they are.

    Block by block: they share one compiled graph, and gradient checkpointing and FSDP2 wrap blocks too.

    Args:
        towers: modules that hold their blocks in lists of the names that open_clip, timm and transformers use.

    Raises:
        CompilerError: there is neither a GPU with Triton nor a C++ compiler.
        ValueError: a tower has none.
    """
    compiler = os.environ.get("CXX", "g++")  # as torch.compile looks for it
    if not torch.cuda.is_available() and shutil.which(compiler) is None:
        raise CompilerError(
            f"compile_towers: torch.compile needs a C++ compiler, and {compiler} is not there; install one, name it in "
            "CXX, or set compile_towers to false"
        )
    for tower in towers:
        lists = [
            (f"{name}.", part)
            for name, part in tower.named_modules()
            if name.rpartition(".")[2] in BLOCKS and isinstance(part, nn.ModuleList | nn.Sequential)
        ]
        if not lists:
            raise ValueError(f"compile_towers: {type(tower).__name__} is no transformer; set it to false")
        for name, blocks in lists:
            if any(name != outer and name.startswith(outer) for outer, _ in lists):
                continue  # a list within a block
            for block in blocks:
                block.compile()
