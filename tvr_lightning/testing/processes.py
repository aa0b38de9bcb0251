"""Training in several CPU processes, for comparison with one process."""

import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from tvr_lightning.data.batch import AudioInput, PairBatch
from tvr_lightning.features import PairedFeatures
from tvr_lightning.media.workers import start_method
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.testing.small import BATCH, random_pairs, small, synthetic_data
from tvr_lightning.training import distributed

STEPS = 2
M = TypeVar("M", bound=pl.LightningModule)


class Batches(pl.LightningDataModule):
    """Data module with random batches of pairs for a number of steps, with the frames and audio that a method needs."""

    def __init__(self, method: RetrievalModule, steps: int) -> None:
        super().__init__()
        self.batches = [random_pairs(method, BATCH, seed) for seed in range(steps)]

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the batches."""
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


def comparable(method: RetrievalModule) -> RetrievalModule:
    """Change a method in place so that training gives the same results in any number of processes, and return it.

    It trains in float64, so that rounding does not hide differences, and with plain gradient descent, since Adam would
    hide a wrong scale. Each pair is encoded with its own random numbers, and each loss is computed with the same ones.
    """
    method.double()
    if (audio_encoder := getattr(method, "audio_encoder", None)) is not None:  # Whisper's own layers compute in float32
        encode_input: Callable[[AudioInput], Tensor] = audio_encoder.float().encode_input
        audio_encoder.encode_input = lambda audio: encode_input(audio).double()
    encode = method.pair_features

    def one_by_one(batch: PairBatch) -> PairedFeatures:
        pairs = []
        for row, index in enumerate(batch.text.index.tolist()):
            torch.manual_seed(index)
            pairs.append(encode(batch[row : row + 1]))
        torch.manual_seed(0)
        return PairedFeatures.cat(pairs)

    method.pair_features = one_by_one  # type: ignore[method-assign]
    return descending(method)


def descending(module: M) -> M:
    """Change a module in place to train with plain gradient descent, and return it."""
    # Evaluated late, because sharding replaces the parameters.
    module.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]
        [parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.1
    )
    return module


def quiet_trainer(**options: Any) -> pl.Trainer:
    """Return a trainer on the CPU that writes and shows nothing and does not validate before training."""
    quiet: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    quiet |= {"accelerator": "cpu", "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    return pl.Trainer(**(quiet | options))


def trained(module: pl.LightningModule, data: Batches, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this process's contiguous share of every batch; return losses and all weights unsharded."""
    share = BATCH // distributed.world_size()
    start = share * distributed.rank()
    data.batches = [batch[start : start + share] for batch in data.batches]
    losses: list[float] = []
    record = LambdaCallback(on_train_batch_end=lambda trainer, module, out, *_: losses.append(float(out["loss"])))
    options = {"gradient_clip_val": 1.0} | options
    trainer = quiet_trainer(devices=distributed.world_size(), max_epochs=1, callbacks=[record], **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You defined a .validation_step")
        trainer.fit(module, datamodule=data)
    weights: dict[str, Any] = module.state_dict()
    whole = {name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in weights.items()}
    return losses, {name: tensor.detach().clone() for name, tensor in whole.items()}


def strategies() -> dict[str, Any]:
    """Return the Lightning strategies for training in the processes that work together."""
    world = distributed.world_size()
    sharded = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return {"ddp": "ddp", "fsdp2": sharded}


@functools.cache
def of_two_processes(recipes: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Train the methods of recipes in two processes, once; return their losses and weights by `<strategy> <recipe>`."""
    return run_processes(_train_all, 2, recipes, synthetic_data())


def _train_all(rank: int, recipes: Sequence[Path], data: str) -> dict[str, Any]:
    results = {}
    for recipe in recipes:
        for name, strategy in strategies().items():
            method = comparable(small(recipe, root=data)[0])
            results[f"{name} {recipe}"] = trained(method, Batches(method, STEPS), strategy=strategy)
    return results


def run_processes(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Run `function(rank, *arguments)` in processes of a gloo group on the CPU, and return the results.

    The function is importable, and its result is saved with `torch.save`. If it fails, torch's error contains its
    traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            _work, (function, world_size, folder, arguments), world_size, start_method=start_method()
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


def _work(rank: int, function: Callable[..., Any], world_size: int, folder: str, arguments: tuple[Any, ...]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # Lightning then uses the process group instead of starting processes
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.save(function(rank, *arguments), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
