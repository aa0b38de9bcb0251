"""The memory, disk space, and time of a run: its work is counted, and the cost of a batch is measured."""

from __future__ import annotations

import copy
import math
import shutil
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import RecipeError
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import PairBatch
from tvr_lightning.data.records import SplitName
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.ncl import NCL
from tvr_lightning.progress import clock
from tvr_lightning.reproduce.profile.costs import Precision, batch_loss, measure_costs, repeated

DEVICES_GB = (8, 12, 16, 24, 40, 48, 80)
SMALL = 8  # pairs of a batch that is measured on a CPU
PATIENCE = 20.0  # seconds that reading is measured for
CHECKPOINTS = 3  # the best, the last, and the one being written
AUDITED = 10  # times that the audit after a test encodes its videos
MARGIN = 1.2  # for what allocators and kernels take
GB = 1e9


# Options of the trainer that decide how much a run computes.
COUNTED = (
    "precision", "max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "overfit_batches", "accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch",
)  # fmt: skip


@dataclass
class Estimate:
    """Requirements of a run; memory and disk space in bytes, times in seconds."""

    title: str
    parameters: int
    trained: int
    memory: float  # maximum per device
    checkpoints: float
    free: float  # on their disk
    clips_per_second: float  # of all workers of a device
    workers: int
    batch_seconds: float  # of training, including reading
    batches: int
    steps: int
    epochs: float
    validations: int
    evaluation_seconds: float  # of all validations and the test
    startup_seconds: float
    device: str

    @property
    def seconds(self) -> float:
        """Time of the whole run."""
        return self.batches * self.batch_seconds + self.evaluation_seconds + self.startup_seconds

    def __str__(self) -> str:
        """Return the lines that a user sees."""
        memory = self.memory / GB
        smallest = next((size for size in DEVICES_GB if memory <= size), None)
        fits = f"a device with {smallest} GB is enough" if smallest else f"{DEVICES_GB[-1]} GB are not enough"
        how = "measured" if self.device.startswith("cuda") else "estimated from small batches on the CPU"
        short = "" if self.checkpoints < self.free else ": NOT ENOUGH"
        return f"""{self.title}: requirements of a run
  parameters: {self.parameters / 1e6:.1f} million, {self.trained / 1e6:.1f} million of them trained
  memory per device: {memory:.2f} GB, {how}; {fits}
  disk: {self.checkpoints / GB:.2f} GB for checkpoints, {self.free / GB:.0f} GB free{short}
  reading: {self.clips_per_second:.1f} clips per second with {self.workers or "no"} workers, measured
  batch: {self.batch_seconds:.2f} s on {self.device}
  time: {clock(self.seconds)} for {self.batches:,} batches, {self.steps:,} steps, and {self.epochs:g} epochs, \
including {clock(self.evaluation_seconds)} for {self.validations:,} validations and the test, and \
{clock(self.startup_seconds)} for starting workers; writing checkpoints comes on top"""


def estimate(recipe: Recipe) -> Estimate:
    """Measure a recipe's data and method, and count the work of its run."""
    method, data, trainer = prepare(recipe)
    batches, epochs, validations = count_training(trainer)
    replicas = _replicas(recipe.config.trainer)
    validation = count_evaluation(method, data, "val", trainer.limit_val_batches, replicas)
    test = count_evaluation(method, data, "test", trainer.limit_test_batches, replicas)

    batch, clips_per_second, start = _read(data)
    device, precision = method.device, trainer.precision_plugin.forward_context
    share, split = data.batch_size // replicas, data.load_split("test")
    measured = share if device.type == "cuda" else min(share, SMALL)
    some = repeated(batch, measured).to(device)
    costs = measure_costs(method, some, len(split.texts), len(split.videos), 2, precision)
    together = max if data.num_workers else sum  # workers read while the device computes
    reading, step = 1 / clips_per_second, costs.training_step_ms / 1000 * share / measured
    video = together((reading, costs.encode_video_ms / 1000))
    pair = costs.score_ms_per_video / len(split.texts) / 1000

    def seconds(texts: int, videos: int, pairs: int) -> float:
        return (texts * costs.encode_text_ms / 1000 + videos * video + pairs * pair) / replicas

    size = sum(p.numel() * p.element_size() for p in method.parameters())
    trained = sum(p.numel() * p.element_size() for p in method.parameters() if p.requires_grad)
    if device.type == "cuda":
        memory = (costs.peak_training_mib or 0.0) * 2**20
    else:  # weights, their gradients and two moments, and what the backward pass keeps
        memory = size + 3 * trained + activation_bytes(method, batch, share, precision)
    folder = Path(recipe.config.results.directory).absolute()
    disk = next(parent for parent in (folder, *folder.parents) if parent.exists())
    audited = AUDITED * min(method.evaluation_config.audit, test[1])
    return Estimate(
        title=f"{method.title} on {data.title}",
        parameters=costs.parameters,
        trained=costs.trainable,
        memory=MARGIN * memory,
        checkpoints=CHECKPOINTS * (size + 2 * trained),
        free=shutil.disk_usage(disk).free,
        clips_per_second=clips_per_second,
        workers=data.num_workers,
        batch_seconds=together((share * reading, step)),
        batches=batches,
        steps=int(trainer.estimated_stepping_batches),
        epochs=epochs,
        validations=validations,
        evaluation_seconds=validations * seconds(*validation) + seconds(*test) + audited * video,
        startup_seconds=start * (3 if validations else 2),  # of the workers of each loader
        device=str(device),
    )


def prepare(recipe: Recipe) -> tuple[RetrievalModule, TextVideoDataModule, Trainer]:
    """Build a recipe's method and data, and a trainer on one device that counts as the recipe's and writes nothing."""
    recipe.check()
    built = recipe.build()
    method, data = built.model, built.data
    if not isinstance(method, RetrievalModule):
        raise RecipeError("--estimate supports retrieval methods only, not question answering")
    trainer = Trainer(
        accelerator="auto", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
        **{name: recipe.config.trainer[name] for name in COUNTED},
    )  # fmt: skip
    trainer.strategy.connect(method)
    trainer._data_connector.attach_data(method, datamodule=data)
    for stage in ("fit", "test"):
        data.setup(stage)
    method.setup("fit")
    method.to(trainer.strategy.root_device)
    return method, data, trainer


def count_training(trainer: Trainer) -> tuple[int, float, int]:
    """Return the number of training batches, epochs, and validations of a run that has an end."""
    steps = trainer.estimated_stepping_batches
    if steps == math.inf:
        raise RecipeError("The run has no end. Set trainer.max_epochs.")
    per_epoch, accumulated = int(trainer.num_training_batches), trainer.accumulate_grad_batches
    full, rest = divmod(int(steps), math.ceil(per_epoch / accumulated))
    batches = full * per_epoch + rest * accumulated
    every, epochs = int(trainer.val_check_batch or 1), trainer.check_val_every_n_epoch
    if not trainer.limit_val_batches:
        validations = 0
    elif epochs is None:
        validations = batches // every
    else:
        full, rest = divmod(batches, per_epoch)
        validations = full // epochs * (per_epoch // every) + (rest // every if (full + 1) % epochs == 0 else 0)
    return batches, batches / per_epoch, validations


def count_evaluation(
    method: RetrievalModule, data: TextVideoDataModule, name: SplitName, limit: float, replicas: int = 1
) -> tuple[int, int, int]:
    """Return the texts and videos that an evaluation encodes on `replicas` devices, and the pairs that it scores."""
    split, config = data.load_split(name), method.evaluation_config

    def seen(items: int) -> int:
        batches = math.ceil(items / (data.eval_batch_size * replicas))
        batches = min(limit, batches) if isinstance(limit, int) else int(limit * batches)
        return min(items, batches * data.eval_batch_size * replicas)

    texts, videos = seen(len(split.texts)), seen(len(split.videos))
    # Scores that take more than an eighth of the budget are computed in each of the two passes.
    pairs = texts * videos * (1 if 4 * texts * videos <= config.memory_bytes // 8 else 2)
    if config.normalization is None or not config.normalization.needs_bank or not pairs:
        return texts, videos, pairs
    if isinstance(method.contrast, NCL) and method.contrast.bank_source == "queue":  # encoded in training
        return texts, videos, pairs + method.contrast.queue_size * (texts + videos)
    train = data.load_split("train")
    bank_texts, bank_videos = (min(config.bank_size, len(items)) for items in (train.texts, train.videos))
    return texts + bank_texts, videos + bank_videos, pairs + bank_texts * videos + texts * bank_videos


def _replicas(options: Any) -> int:
    """Return the number of devices that share a batch."""
    devices = options.get("devices")
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 0
    return max(count or torch.cuda.device_count(), 1) * int(options.get("num_nodes") or 1)


def _read(data: TextVideoDataModule) -> tuple[PairBatch, float, float]:
    """Return a small training batch, the clips read per second, and the seconds until workers read."""
    small = copy.copy(data)
    small.batch_size, small.trainer = min(SMALL, data.batch_size), None  # one process reads
    ahead, began = 2 * data.num_workers, time.perf_counter()
    batches = iter(small.train_dataloader())
    *_, batch = islice(batches, 1 + ahead)  # those that were read while the first one was awaited
    start, read, began = time.perf_counter() - began, 0, time.perf_counter()
    for following in batches:
        read += len(following)
        if read >= 4 * SMALL * max(1, data.num_workers) or time.perf_counter() - began > PATIENCE:
            break
    if not read:  # the split is smaller than what workers read ahead
        return batch, (ahead + 1) * len(batch) / start, start
    return batch, read / max(time.perf_counter() - began, 1e-9), start


def activation_bytes(method: RetrievalModule, batch: PairBatch, share: int, precision: Precision) -> float:
    """Return what the backward pass of a device's share of a batch keeps, from two small batches.

    One part grows with the number of pairs, another with its square. A gradient cache keeps one chunk at a time.
    """
    chunk = method.optimizer_config.gradient_cache
    pairs = min(share, chunk) if chunk else share
    large = max(4, min(SMALL, pairs))
    small = large // 2
    few, more = (saved_bytes(method, repeated(batch, size).to(method.device), precision) for size in (small, large))
    square = max((more / large - few / small) / (large - small), 0.0)
    return (more / large - square * large) * pairs + square * pairs**2


def saved_bytes(method: RetrievalModule, batch: PairBatch, precision: Precision) -> float:
    """Return the bytes of the distinct tensors that the loss of a batch saves for its backward pass."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        batch_loss(method.train(), batch, precision)
    parameters = {p.untyped_storage().data_ptr() for p in method.parameters()}
    return float(sum(size for storage, size in found.items() if storage not in parameters))
