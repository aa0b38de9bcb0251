"""`tvr fit --estimate`: what a run needs before it starts: parameters, memory, disk, decoding, time."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import PairBatch
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.recipe import RecipeCLI
from tvr_lightning.recipe_files import RecipeError
from tvr_lightning.training.gradient_cache import encode_in_chunks
from tvr_lightning.training.optim import build_optimizer
from tvr_lightning.training.run_folder import RunTrainer

DEVICES_GB = (8, 12, 16, 24, 40, 48, 80)
SMALL = 8  # pairs of a batch on which is measured before a whole one
PATIENCE = 20.0  # seconds that whole batches may take on a CPU; longer ones are worked out from small ones
CHECKPOINTS = 3  # best, last, and the one being written
AUDITED = 10  # times that the audit after a test encodes its videos
ROOM = 1.2  # what allocators and kernels take besides
GB = 1e9
PROBE = 2**25  # bytes written to learn how fast checkpoints are


@dataclass
class Estimate:
    """What a run needs.

    Attributes:
        title: of method and dataset.
        parameters, trained: how many numbers.
        memory: bytes per device at the largest.
        measured_memory: whether that was measured on the device, or worked out from batches on the CPU.
        checkpoints: bytes of the checkpoints at the largest.
        room: bytes free where they go.
        clips_per_second: that all workers of one device read.
        workers: how many read.
        step_seconds: of one optimiser step, reading included.
        whole_batches: whether steps were timed on whole batches, or worked out from small ones.
        steps, epochs: of the run, and per epoch.
        evaluation_seconds: of all validations and of the test.
        other_seconds: of starting workers and writing checkpoints.
        device: on which all this was timed.
    """

    title: str
    parameters: int
    trained: int
    memory: float
    measured_memory: bool
    checkpoints: float
    room: float
    clips_per_second: float
    workers: int
    step_seconds: float
    whole_batches: bool
    steps: int
    epochs: float
    evaluation_seconds: float
    other_seconds: float
    device: str

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.steps * self.step_seconds + self.evaluation_seconds + self.other_seconds

    def fits(self, gigabytes: float) -> bool:
        """Whether the run fits a device of that memory."""
        return self.memory <= gigabytes * GB

    def lines(self) -> Iterator[str]:
        """Yield what a user is told."""
        how = "measured" if self.measured_memory else "estimated from small batches on the CPU"
        smallest = next((size for size in DEVICES_GB if self.fits(size)), None)
        which = f"a device with {smallest} GB is enough" if smallest else f"{DEVICES_GB[-1]} GB are not enough"
        yield f"{self.title}: requirements of a run"
        yield f"  parameters: {self.parameters / 1e6:.1f} million, {self.trained / 1e6:.1f} million of them trained"
        yield f"  memory per device: {self.memory / GB:.2f} GB, {how}"
        yield f"  It {'fits' if self.fits(24) else 'does not fit'} in 24 GB; {which}."
        short = "" if self.checkpoints < self.room else ": NOT ENOUGH"
        yield f"  disk: {self.checkpoints / GB:.2f} GB for checkpoints, {self.room / GB:.0f} GB free{short}"
        yield f"  reading: {self.clips_per_second:.1f} clips per second with {self.workers or 'no'} workers, measured"
        how = "measured" if self.whole_batches else "estimated from small batches"
        yield f"  step: {self.step_seconds:.2f} s on {self.device}, {how}"
        yield (
            f"  time: {_spell(self.seconds)} for {self.steps:,} steps in {self.epochs:g} epochs, including "
            f"{_spell(self.evaluation_seconds)} for validation and test and "
            f"{_spell(self.other_seconds)} for startup and checkpoints"
        )


def _spell(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.1f} minutes"


class _ParsedCLI(RecipeCLI):
    """A recipe with method and data built, and a trainer on one device that is here."""

    def instantiate_trainer(self, **kwargs: Any) -> RunTrainer:
        """Build a trainer that keeps nothing."""
        precision = self.config_init.trainer.get("precision")
        return RunTrainer(
            accelerator="auto", devices=1, precision=precision, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip


def estimate_fit(words: Sequence[str]) -> int:
    """Print what `tvr fit` with these words would need; train nothing and write nothing."""
    cli = _ParsedCLI(args=list(words), run=False)
    for line in estimate(cli).lines():
        print(line)
    return 0


def estimate(cli: RecipeCLI) -> Estimate:
    """Measure a recipe's data and method for less than a minute or two.

    Args:
        cli: with method and data built, on a trainer of one device.

    Raises:
        RecipeError: it is no recipe of retrieval, or trains without end.
    """
    method, data, options = cli.model, cli.datamodule, cli.config.trainer
    if not isinstance(method, RetrievalModule):
        raise RecipeError("--estimate supports retrieval methods only, not question answering")
    trainer = cli.trainer
    method.trainer, data.trainer, trainer.datamodule = trainer, trainer, data  # type: ignore[attr-defined]
    trainer.strategy.connect(method)
    data.setup("fit")
    data.setup("test")
    method.setup("fit")
    method.to(trainer.strategy.root_device)
    replicas = _replicas(options)
    batch, clips_per_second, start = _read(data)
    share = data.batch_size // replicas
    train = data.load_split("train")
    samples = len(train.videos if data.captions_per_epoch == "one" else train.texts)
    per_epoch = samples // data.batch_size if data.drop_last else math.ceil(samples / data.batch_size)
    steps, epochs = _length(options, per_epoch)
    step, encode, pair, whole, memory = _compute(method, batch, share)
    workers = data.num_workers
    reading = share / clips_per_second
    validations = _validations(epochs, options)
    test = data.load_split("test")
    evaluated = validations * len(data.load_split("val").videos) + len(test.videos)
    evaluated += AUDITED * min(method.evaluation_config.audit, len(test.videos))
    evaluation = evaluated * _together(1 / clips_per_second, encode, workers, method.device)
    evaluation += 2 * pair * len(test.texts) * len(test.videos)
    evaluation += start * (2 if validations else 1)  # their loaders have workers of their own
    folder = _existing(Path(cli.config.results.directory))
    parameters = list(method.parameters())
    weights = float(sum(p.numel() * p.element_size() for p in parameters))
    trained = float(sum(p.numel() * p.element_size() for p in parameters if p.requires_grad))
    return Estimate(
        title=f"{method.title} on {data.title}",
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        # Weights, their gradients, two moments of each, and what the backward pass needs.
        memory=memory if memory is not None else (weights + 3 * trained + _activations(method, batch, share)) * ROOM,
        measured_memory=memory is not None,
        checkpoints=CHECKPOINTS * (weights + 2 * trained),
        room=float(shutil.disk_usage(folder).free),
        clips_per_second=clips_per_second,
        workers=workers,
        step_seconds=_together(reading, step, workers, method.device),
        whole_batches=whole,
        steps=steps,
        epochs=epochs,
        # The last weights are written after every epoch, the best after a validation.
        other_seconds=start + (weights + 2 * trained) * (epochs + validations) / _written_per_second(folder),
        evaluation_seconds=evaluation,
        device=str(method.device),
    )


def _replicas(options: Any) -> int:
    """Over how many devices a batch is shared out."""
    devices = options.get("devices")
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 0
    return max(count or torch.cuda.device_count(), 1) * int(options.get("num_nodes") or 1)


def _length(options: Any, per_epoch: int) -> tuple[int, float]:
    """Steps and epochs of the run."""
    if not per_epoch:
        raise RecipeError("The batch is larger than an epoch. Lower data.init_args.batch_size.")
    most = int(options.get("max_steps") or -1)
    epochs = options.get("max_epochs")
    if epochs in (None, -1) and most < 0:
        raise RecipeError("The run has no end. Set trainer.max_epochs.")
    steps = most if epochs in (None, -1) else per_epoch * int(epochs)
    steps = min(steps, most) if most >= 0 else steps
    return steps, steps / per_epoch


def _validations(epochs: float, options: Any) -> int:
    if options.get("limit_val_batches") == 0:
        return 0
    return int(epochs) // int(options.get("check_val_every_n_epoch") or 1)


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def _written_per_second(folder: Path) -> float:
    """Bytes that reach the disk in a second."""
    content = bytes(PROBE)
    with NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return PROBE / max(time.perf_counter() - began, 1e-9)


def _read(data: TextVideoDataModule) -> tuple[PairBatch, float, float]:
    """A small batch of training pairs, how many a second the workers read under way, and seconds until they are."""
    whole, trainer = data.batch_size, data.trainer
    data.batch_size, data.trainer = min(SMALL, whole), None  # one process reads
    try:
        began = time.perf_counter()
        batches = iter(data.train_dataloader())
        first = next(batches)
        # What the workers read ahead while the first was waited for does not count.
        ahead = 2 * data.num_workers
        for _, batch in zip(range(ahead), batches, strict=False):
            first = batch
        start, read, began = time.perf_counter() - began, 0, time.perf_counter()
        for batch in batches:
            read += len(batch)
            if read >= 4 * SMALL * max(1, data.num_workers) or time.perf_counter() - began > PATIENCE:
                break
        seconds = time.perf_counter() - began
        if not read:  # fewer than the workers read ahead: as fast as they came, start included
            read, seconds = (ahead + 1) * SMALL, start
    finally:
        data.batch_size, data.trainer = whole, trainer
        data._training_loader = None
    return first, read / max(seconds, 1e-9), start


def _together(reading: float, computing: float, workers: int, device: torch.device) -> float:
    """Seconds of reading and computing that go on side by side, or after one another where nothing reads besides."""
    if workers == 0:
        return reading + computing
    if device.type != "cpu":
        return max(reading, computing)
    cores = os.cpu_count() or 1
    shared = (reading * min(workers, cores) + computing * min(torch.get_num_threads(), cores)) / cores
    return max(reading, computing, shared)


def _compute(method: RetrievalModule, batch: PairBatch, share: int) -> tuple[float, float, float, bool, float | None]:
    """Seconds of a step, of encoding one video, of scoring one pair; whether of whole batches; peak bytes of a GPU."""
    small = _of_size(batch, min(share, len(batch))).to(method.device)
    optimizer, _ = build_optimizer(method, method.optimizer_config, total_steps=100, epochs=1)
    saved = {name: value.detach().cpu().clone() for name, value in method.state_dict().items()}

    def step(pairs: PairBatch) -> None:
        optimizer.zero_grad(set_to_none=True)
        _loss(method, pairs).backward()
        optimizer.step()

    method.train()
    seconds = _timed(method.device, lambda: step(small))
    on_gpu = method.device.type == "cuda"
    whole = on_gpu or len(small) == share or 3 * seconds * share / len(small) < PATIENCE
    if whole:
        pairs = _of_size(batch, share).to(method.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(method.device)
        try:
            seconds = _timed(method.device, lambda: step(pairs))
        except torch.cuda.OutOfMemoryError as error:
            size = torch.cuda.get_device_properties(method.device).total_memory / GB
            raise RecipeError(f"{share} pairs do not fit on this {size:.0f} GB device; lower the batch size") from error
    else:
        seconds *= share / len(small)
    method.finite_losses.check()
    memory = float(torch.cuda.max_memory_allocated(method.device)) * ROOM if on_gpu else None
    method.load_state_dict(saved)
    method.zero_grad(set_to_none=True)
    method.eval()
    with torch.no_grad():
        context = method.trainer.precision_plugin.forward_context
        with context():
            text, video = method.text_features(small.text), method.video_features(small.video)
            encode = _timed(method.device, lambda: method.video_features(small.video)) / len(small)
        pair = _timed(method.device, lambda: method.score(text.float(), video.float())) / len(small) ** 2
    return seconds, encode, pair, whole, memory


def _of_size(batch: PairBatch, pairs: int) -> PairBatch:
    """A batch of that many pairs, the given ones again and again."""
    return batch[torch.arange(pairs) % len(batch)]


def _loss(method: RetrievalModule, batch: PairBatch) -> Tensor:
    """The loss of a training step on one device, without its log."""
    chunk = method.optimizer_config.gradient_cache
    with method.trainer.precision_plugin.forward_context():
        pairs = encode_in_chunks(method.pair_features, batch, chunk) if chunk else method.pair_features(batch)
    terms = method.contrast.terms(method.losses, pairs.float())
    return method.total_loss(terms, batch)


def _timed(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of the faster of two runs after a first one."""
    run()
    found = []
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)


def _activations(method: RetrievalModule, batch: PairBatch, share: int) -> float:
    """Bytes that the backward pass of a device's share of a batch keeps.

    What belongs to an item grows with the pairs, what belongs to a pair of text and video with their square; batches of
    two sizes tell both. With a gradient cache, one chunk is kept at a time.
    """
    chunk = method.optimizer_config.gradient_cache
    pairs = min(share, chunk) if chunk else share
    small, large = max(2, min(SMALL, pairs) // 2), max(4, min(SMALL, pairs))
    method.train()
    kept = [_kept(method, _of_size(batch, size).to(method.device)) for size in (small, large)]
    square = max((kept[1] / large - kept[0] / small) / (large - small), 0.0)
    line = kept[1] / large - square * large
    return line * pairs + square * pairs**2


def _kept(method: RetrievalModule, batch: PairBatch) -> float:
    parameters = {p.untyped_storage().data_ptr() for p in method.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(method, batch)
    del loss
    media = sum(t.numel() * t.element_size() for t in _tensors(batch))
    return float(sum(found.values()) + media)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))
