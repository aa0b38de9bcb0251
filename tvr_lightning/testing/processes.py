"""Training in several real processes on the CPU, to be compared with one."""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from tvr_lightning.data.batch import AudioInput, PairBatch
from tvr_lightning.features import PairedFeatures
from tvr_lightning.media.workers import start_method
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.testing.small import BATCH, random_pairs, small, synthetic_data

STEPS = 2
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "use_distributed_sampler": False,
}  # fmt: skip


class Batches(pl.LightningDataModule):
    """Batches of pairs as they are."""

    store = None

    def __init__(self, batches: list[PairBatch]) -> None:
        super().__init__()
        self.batches = batches

    @classmethod
    def of(cls, method: RetrievalModule, steps: int) -> Batches:
        """Return random batches for a method.

        Args:
            method: says how many frames, how large, and what hears.
            steps: how many batches.
        """
        return cls([random_pairs(method, BATCH, seed) for seed in range(steps)])

    def train_dataloader(self) -> DataLoader[Any]:
        """Return them."""
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


class Losses(pl.Callback):
    """Notes the losses of all steps."""

    def __init__(self) -> None:
        self.noted: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss."""
        self.noted.append(float(outputs["loss"]))


def comparable(method: RetrievalModule) -> RetrievalModule:
    """Return a method ready to be trained alike by any number of processes.

    In float64, where rounding hides no difference, and by plain gradient descent: Adam would hide a wrong scale. Every
    pair is encoded with random numbers of its own, and every loss computed with the same ones.

    Args:
        method: with its starting weights; changed in place.
    """
    method.double()
    hears = getattr(method, "audio_encoder", None)
    if hears is not None:  # Whisper's own layers compute in float32
        hears.float().encode_input = _in_double(hears.encode_input)
    encode = method.pair_features

    def one_by_one(batch: PairBatch) -> PairedFeatures:
        found = []
        for row, place in enumerate(batch.text.index.tolist()):
            torch.manual_seed(place)
            found.append(encode(batch[row : row + 1]))
        torch.manual_seed(0)
        return PairedFeatures.cat(found)

    method.pair_features = one_by_one  # type: ignore[method-assign]
    return descending(method)


M = TypeVar("M", bound=pl.LightningModule)


def descending(module: M) -> M:
    """Return a module that trains by plain gradient descent.

    Args:
        module: changed in place.
    """
    # Sharding replaces parameters, so not before they are due.
    module.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]
        [parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.1
    )
    return module


def trained(
    module: pl.LightningModule,
    data: Batches,
    *,
    rank: int = 0,
    world: int = 1,
    strategy: Any = "auto",
    clip: float | None = 1.0,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this process's contiguous share of every batch.

    Args:
        module: with its starting weights.
        data: the batches of all processes together.
        rank, world: of this process, and how many there are.
        strategy: of Lightning's trainer.
        clip: largest norm of the gradient.

    Returns:
        The losses, and all weights in full.
    """
    shares = [len(batch) // world for batch in data.batches]
    data.batches = [batch[rank * n : (rank + 1) * n] for batch, n in zip(data.batches, shares, strict=True)]
    losses, options = Losses(), {**QUIET, "devices": world}
    trainer = pl.Trainer(
        max_epochs=1, strategy=strategy, callbacks=[losses], gradient_clip_val=clip, num_sanity_val_steps=0, **options
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You defined a .validation_step")
        warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
        trainer.fit(module, datamodule=data)
    return losses.noted, {name: full(tensor) for name, tensor in module.state_dict().items()}


def _in_double(encode: Callable[[AudioInput], Tensor]) -> Callable[[AudioInput], Tensor]:
    return lambda audio: encode(audio).double()


def full(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded as a whole."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def strategies(world: int) -> dict[str, Any]:
    """Return the strategies that methods train by on several processes.

    Args:
        world: how many.
    """
    sharded = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return {"ddp": "ddp", "fsdp2": sharded}


def join_processes(rank: int, world: int) -> None:
    """Have Lightning take a process group that exists, and start no processes of its own."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="localhost")
    os.environ["MASTER_PORT"] = "0"


def _train_all(rank: int, world: int, recipes: Sequence[Path], data: str) -> dict[str, Any]:
    """Losses and weights by strategy and recipe."""
    join_processes(rank, world)
    found = {}
    for recipe in recipes:
        for name, strategy in strategies(world).items():
            method = comparable(small(recipe, f"--data.init_args.root={data}")[0])
            found[f"{name} {recipe}"] = list(
                trained(method, Batches.of(method, STEPS), rank=rank, world=world, strategy=strategy)
            )
    return found


@functools.cache
def of_two_processes(recipes: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Train the methods of recipes in two processes, once; return what each process found, losses and weights.

    Args:
        recipes: of the methods; results go by `<strategy> <recipe>`.
    """
    return run_processes(_train_all, 2, 2, recipes, synthetic_data().name)


def _work(rank: int, function: Callable[..., Any], world_size: int, folder: str, arguments: tuple[Any, ...]) -> None:
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
    """Run `function(rank, *arguments)` in processes that form a gloo group on the CPU; return their results.

    They are forked from the server of worker processes, which has imported the package once.

    Args:
        function: importable, of a module; what it returns must survive `torch.save` as tensors and plain values.
        world_size: how many processes.
        arguments: of the function besides its rank.

    Raises:
        AssertionError: one of them failed; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
                _work, (function, world_size, folder, arguments), world_size, start_method=start_method()
            )
        except Exception as error:
            texts = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            raise AssertionError("\n".join(texts) or str(error)) from error
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world_size)]
