"""The memory, disk space, and time of a run: its work is counted, and the cost of a batch is measured."""

import copy
import math
import shutil
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import PairBatch
from tvr_lightning.data.records import SplitName
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import memory_budget
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.ncl.method import NCL
from tvr_lightning.progress import clock
from tvr_lightning.reproduce.profile.costs import Precision, batch_loss, measure_costs, repeated

SMALL = 8  # pairs of a batch that is measured on a CPU
PATIENCE = 20.0  # seconds that reading is measured for
CHECKPOINTS = 3  # the best, the last, and the one being written
AUDITED = 10  # times that the audit after a test encodes its videos
MARGIN = 1.2  # for what allocators and kernels take

# Options of the trainer that decide how much a run computes.
COUNTED = (
    "precision", "max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "overfit_batches", "accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch",
)  # fmt: skip


@dataclass
class Estimate:
    """Requirements of a run."""

    seconds: float
    evaluation_seconds: float  # of all validations and the test
    memory: float  # maximum per device in bytes
    text: str  # that a user sees


def estimate(recipe: Recipe) -> Estimate:
    """Measure a recipe's data and method, and count the work of its run."""
    method, data, trainer = prepare(recipe)
    batches, epochs, validations = count_training(trainer)
    batch, clips_per_second, start = _read(data)
    device = method.device
    precision = trainer.precision_plugin.forward_context
    options = recipe.config.trainer
    devices = options.get("devices")
    count = len(devices) if isinstance(devices, list) else devices
    if count in ("auto", "-1", -1, None):
        count = max(torch.cuda.device_count(), 1)
    replicas = int(count) * int(options.get("num_nodes") or 1)
    on_gpu = device.type == "cuda"
    share = data.batch_size // replicas
    split = data.load_split("test")
    measured = share if on_gpu else min(share, SMALL)
    costs = measure_costs(
        method, repeated(batch, measured).to(device), len(split.texts), len(split.videos), 2, precision
    )
    together = max if data.num_workers else sum  # workers read while the device computes
    reading_ms = 1000 / clips_per_second
    video_ms = together((reading_ms, costs.encode_video_ms))
    batch_seconds = together((share * reading_ms, costs.training_step_ms * share / measured)) / 1000

    def evaluation_ms(name: SplitName, limit: float) -> float:
        texts, videos, pairs = count_evaluation(method, data, name, limit, replicas)
        pairs_ms = pairs * costs.score_ms_per_video / len(split.texts)
        return (texts * costs.encode_text_ms + videos * video_ms + pairs_ms) / replicas

    test_ms = evaluation_ms("test", trainer.limit_test_batches)
    test_ms += AUDITED * min(method.evaluation_config.audit, len(split.videos)) * video_ms
    evaluation = (validations * evaluation_ms("val", trainer.limit_val_batches) + test_ms) / 1000
    startup = start * (3 if validations else 2)  # of the workers of each loader
    seconds = batches * batch_seconds + evaluation + startup

    size = sum(p.numel() * p.element_size() for p in method.parameters())
    trained = sum(p.numel() * p.element_size() for p in method.parameters() if p.requires_grad)
    if on_gpu:
        memory = MARGIN * (costs.peak_training_mib or 0.0) * 2**20
    else:  # weights, their gradients and two moments, and what the backward pass keeps
        memory = MARGIN * (size + 3 * trained + activation_bytes(method, batch, share, precision))
    folder = Path(recipe.config.results.directory).absolute()
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    needed = CHECKPOINTS * (size + 2 * trained)
    text = f"""{method.title} on {data.title}: requirements of a run
  parameters: {costs.trainable / 1e6:.2f} million trained, \
{(costs.parameters - costs.trainable) / 1e6:.2f} million frozen
  memory per device: {memory / 1e9:.2f} GB, {"measured" if on_gpu else "estimated from small batches on the CPU"}
  disk: {needed / 1e9:.2f} GB for checkpoints, {free / 1e9:.0f} GB free{": NOT ENOUGH" if needed > free else ""}
  reading: {clips_per_second:.1f} clips per second with {data.num_workers or "no"} workers, measured
  batch: {batch_seconds:.2f} s on {device}
  time: {clock(seconds)} for {batches:,} batches, {int(trainer.estimated_stepping_batches):,} steps, and {epochs:g} \
epochs, including {clock(evaluation)} for {validations:,} validations and the test, and {clock(startup)} for starting \
workers; writing checkpoints comes on top"""
    return Estimate(seconds, evaluation, memory, text)


def prepare(recipe: Recipe) -> tuple[RetrievalModule, TextVideoDataModule, Trainer]:
    """Build a recipe's method and data, and a trainer on one device that counts as the recipe's and writes nothing."""
    recipe.check()
    built = recipe.build()
    method, data = built.model, built.data
    if not isinstance(method, RetrievalModule):
        raise UserError("--estimate supports retrieval methods only, not question answering")
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
        raise UserError("The run has no end. Set trainer.max_epochs.")
    per_epoch, accumulated = int(trainer.num_training_batches), trainer.accumulate_grad_batches
    full, rest = divmod(int(steps), math.ceil(per_epoch / accumulated))
    batches = full * per_epoch + rest * accumulated
    every = int(trainer.val_check_batch or 1)
    epochs = trainer.check_val_every_n_epoch
    validations = batches // every
    if epochs is not None:
        full, rest = divmod(batches, per_epoch)
        validations = full // epochs * (per_epoch // every) + (rest // every if (full + 1) % epochs == 0 else 0)
    return batches, batches / per_epoch, validations if trainer.limit_val_batches else 0


def count_evaluation(
    method: RetrievalModule, data: TextVideoDataModule, name: SplitName, limit: float, replicas: int = 1
) -> tuple[int, int, int]:
    """Return the texts and videos that an evaluation encodes on `replicas` devices, and the pairs that it scores."""
    split = data.load_split(name)
    config = method.evaluation_config

    def seen(items: int) -> int:
        batches = math.ceil(items / (data.eval_batch_size * replicas))
        batches = min(limit, batches) if isinstance(limit, int) else int(limit * batches)
        return min(items, batches * data.eval_batch_size * replicas)

    texts, videos = seen(len(split.texts)), seen(len(split.videos))
    budget = memory_budget(config.memory_gib, method.device)
    # Scores that take more than an eighth of the budget are computed in each of the two passes.
    pairs = texts * videos * (1 if 4 * texts * videos <= budget // 8 else 2)
    if config.normalization is None or not config.normalization.needs_bank or not pairs:
        return texts, videos, pairs
    if isinstance(method.contrast, NCL) and method.contrast.bank_source == "queue":  # encoded in training
        return texts, videos, pairs + method.contrast.queue_size * (texts + videos)
    train = data.load_split("train")
    bank_texts, bank_videos = (min(config.bank_size, len(items)) for items in (train.texts, train.videos))
    return texts + bank_texts, videos + bank_videos, pairs + bank_texts * videos + texts * bank_videos


def _read(data: TextVideoDataModule) -> tuple[PairBatch, float, float]:
    """Return a small training batch, the clips read per second, and the seconds until the first batch."""
    small = copy.copy(data)
    small.batch_size = min(SMALL, data.batch_size)
    small.trainer = None  # one process reads
    ahead = 1 + 2 * data.num_workers  # batches that are read while the first one is awaited
    counts = []
    ends = [time.perf_counter()]
    for batch in islice(small.train_dataloader(), ahead + 4 * max(1, data.num_workers)):
        counts.append(len(batch))
        ends.append(time.perf_counter())
        if ends[-1] - ends[1] > PATIENCE:
            break
    first = ahead if len(counts) > ahead else 0  # 0 if the split is smaller than what workers read ahead
    return batch, sum(counts[first:]) / (ends[-1] - ends[first]), ends[1] - ends[0]


def activation_bytes(method: RetrievalModule, batch: PairBatch, share: int, precision: Precision) -> float:
    """Return the bytes kept for the backward pass of a device's share of a batch, from two small batches.

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
