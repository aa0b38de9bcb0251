"""Training in several CPU processes, for comparison with one process."""

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
    """Data module with given batches of pairs."""

    store = None

    def __init__(self, batches: list[PairBatch]) -> None:
        super().__init__()
        self.batches = batches

    @classmethod
    def of(cls, method: RetrievalModule, steps: int) -> Batches:
        """Return random batches for a number of steps, with the frames and audio that a method needs."""
        return cls([random_pairs(method, BATCH, seed) for seed in range(steps)])

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the batches."""
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


class Losses(pl.Callback):
    """Callback that records the loss of every step."""

    def __init__(self) -> None:
        self.noted: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss."""
        self.noted.append(float(outputs["loss"]))


def comparable(method: RetrievalModule) -> RetrievalModule:
    """Return a method that gives the same training results in any number of processes.

    It trains in float64, so that rounding does not hide differences, and with plain gradient descent, since Adam would
    hide a wrong scale. Each pair is encoded with its own random numbers, and each loss is computed with the same ones.

    Args:
        method: Method with its initial weights; changed in place.
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
    """Change a module in place to train with plain gradient descent, and return it."""
    # Evaluated late, because sharding replaces the parameters.
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
    precision: Any = "32-true",
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this process's contiguous share of every batch; return losses and all weights unsharded."""
    shares = [len(batch) // world for batch in data.batches]
    data.batches = [batch[rank * n : (rank + 1) * n] for batch, n in zip(data.batches, shares, strict=True)]
    losses, options = Losses(), {**QUIET, "devices": world}
    trainer = pl.Trainer(
        max_epochs=1,
        strategy=strategy,
        callbacks=[losses],
        gradient_clip_val=clip,
        num_sanity_val_steps=0,
        precision=precision,
        **options,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You defined a .validation_step")
        warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
        trainer.fit(module, datamodule=data)
    return losses.noted, {name: full(tensor) for name, tensor in module.state_dict().items()}


def _in_double(encode: Callable[[AudioInput], Tensor]) -> Callable[[AudioInput], Tensor]:
    return lambda audio: encode(audio).double()


def full(tensor: Tensor) -> Tensor:
    """Return a possibly sharded tensor unsharded."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def strategies(world: int) -> dict[str, Any]:
    """Return the Lightning strategies for training in `world` processes."""
    sharded = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return {"ddp": "ddp", "fsdp2": sharded}


def join_processes(rank: int, world: int) -> None:
    """Make Lightning use the existing process group instead of starting processes."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="localhost")
    os.environ["MASTER_PORT"] = "0"


def _train_all(rank: int, world: int, recipes: Sequence[Path], data: str) -> dict[str, Any]:
    """Return losses and weights by strategy and recipe."""
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
    """Train the methods of recipes in two processes, once; return their losses and weights by `<strategy> <recipe>`."""
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
    """Run `function(rank, *arguments)` in processes of a gloo group on the CPU, and return the results.

    The function is importable, and its result is saved with `torch.save`.

    Raises:
        AssertionError: A process failed; the message contains its traceback.
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
