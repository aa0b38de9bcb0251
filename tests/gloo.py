"""Real processes for tests of what runs on several devices: a gloo group on the CPU."""

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _work(rank: int, function: Callable[..., Any], world_size: int, folder: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *arguments), Path(folder) / f"{rank}.pt")
    except Exception:
        (Path(folder) / f"{rank}.error").write_text(traceback.format_exc())
        raise
    dist.barrier()
    dist.destroy_process_group()


def run_processes(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Run `function(rank, *arguments)` in `world_size` spawned processes that form a gloo group; return their results.

    `function` must be importable (a module-level function); what it returns must survive `torch.save` as plain tensors,
    numbers, strings, lists and dicts.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_work, args=(function, world_size, folder, arguments), nprocs=world_size, join=True)
        except Exception as error:
            texts = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            raise AssertionError("\n".join(texts) or str(error)) from error
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world_size)]
