"""Cost of a method: parameters, FLOPs, time, and memory, on random inputs of the recipe's sizes or on given batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tvr_lightning.data.batch import AudioInput, Media, PairBatch, TextBatch, VideoBatch
from tvr_lightning.evaluation.loop import PAIR_BYTES
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.features import Record, TextFeatures, VideoFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.reproduce.runs.memory import peak_memory_mib
from tvr_lightning.training.gradient_cache import encode_in_chunks
from tvr_lightning.training.optim import build_optimizer

WORDS = "a person walks along the street while a small dog runs beside a red car"
AUDIO_STEPS, AUDIO_SAMPLES = 1500, 480_000  # of 30 s: vectors of 20 ms, and samples at 16 kHz
STAGES = {
    "encode_video": "encoder, videos",
    "encode_text": "encoder, texts",
    "video_layers": "method's layers, per video",
    "text_layers": "method's layers, per text",
    "score": "scoring, all pairs",
    "training_step": "training step, forward and backward",
}
"""Stages that FLOPs are counted in, and their descriptions."""
Precision = Callable[[], AbstractContextManager[Any]]
R = TypeVar("R", bound=Record)


@dataclass
class Costs:
    """Measured costs; FLOPs are those of products, convolutions, and attention, two per multiplication and addition.

    Attributes:
        parameters, trainable: Number of all parameters and of trained ones.
        parameters_by_module: Parameters of the method's direct children.
        flops_by_stage: FLOPs of one batch by stage; `encode_video` includes audio, `score` all pairs of the batch.
        training_step_ms: Time of one optimizer step.
        encode_video_ms, encode_text_ms: Time of one item as its share of a batch, media in memory.
        score_ms_per_video: Time to score all queries against one video.
        ms_per_video: Sum of encode_video_ms and score_ms_per_video.
        peak_inference_mib, peak_training_mib: Maximum memory allocated on a GPU; on a CPU, maximum resident memory of
            the process so far; None if unknown.
    """

    parameters: int
    trainable: int
    parameters_by_module: dict[str, int]
    flops_by_stage: dict[str, int]
    training_step_ms: float
    encode_video_ms: float
    encode_text_ms: float
    score_ms_per_video: float
    ms_per_video: float
    peak_inference_mib: float | None
    peak_training_mib: float | None


class Times(NamedTuple):
    """Measured times in seconds, and peak memory in MiB if it is known."""

    step: float
    text: float
    video: float
    pair: float
    inference_mib: float | None
    training_mib: float | None


def seconds_of(device: torch.device, run: Callable[[], object], repeats: int = 2) -> float:
    """Return the median wall-clock time of some calls after a first one."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])


def batch_loss(module: RetrievalModule, batch: PairBatch, precision: Precision) -> Tensor:
    """Return the loss of a training step on one device, with the chunks of its gradient cache."""
    chunk = module.optimizer_config.gradient_cache
    with precision():
        pairs = encode_in_chunks(module.pair_features, batch, chunk) if chunk else module.pair_features(batch)
    with torch.autocast(module.device.type, enabled=False):
        terms = module.contrast.terms(module.losses, pairs.float())
    return torch.stack([term.reshape(()) for term in terms.values()]).sum()


def repeated(record: R, count: int) -> R:
    """Return that many items, the given ones over and over."""
    return record[torch.arange(count) % len(record)]


def measure_times(
    module: RetrievalModule, batch: PairBatch, texts: int, videos: int, repeats: int, precision: Precision
) -> Times:
    """Measure a training step on a batch, encoding an item of it, and scoring a pair.

    Args:
        module: Method on its device.
        batch: Matching pairs on the same device.
        texts, videos: N and M of an evaluation, in whose blocks pairs are scored.
        repeats: Number of measurements of each time.
        precision: Context of forward passes, such as autocast.
    """
    device, on_gpu = module.device, module.device.type == "cuda"

    def peak_mib() -> float | None:
        return torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else peak_memory_mib()

    def encode_text() -> TextFeatures:
        with precision():
            return module.text_features(batch.text)

    def encode_video() -> VideoFeatures:
        with precision():
            return module.video_features(batch.video)

    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    module.eval()
    with torch.no_grad():
        text, video = encode_text().float(), encode_video().float()
        text_seconds, video_seconds = (
            seconds_of(device, encode_text, repeats),
            seconds_of(device, encode_video, repeats),
        )
        # Views of one item, since only their sizes count.
        every_text = text[:1].apply(lambda tensor: tensor.expand(texts, *tensor.shape[1:]))
        every_video = video[:1].apply(lambda tensor: tensor.expand(videos, *tensor.shape[1:]))
        budget = module.evaluation_config.memory_bytes
        blocks = PairScores(
            module.score, every_text, every_video, memory_budget_bytes=budget, pair_bytes=PAIR_BYTES, device=device
        )
        rows, columns = min(blocks.block_texts, texts), min(blocks.block_videos, videos)
        some, few = repeated(text, rows), repeated(video, columns)
        block_seconds = seconds_of(device, lambda: module.score(some, few), repeats)
    inference = peak_mib()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    module.train()
    optimizer, _ = build_optimizer(module, module.optimizer_config, total_steps=100, epochs=1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        batch_loss(module, batch, precision).backward()
        optimizer.step()

    step_seconds, pairs = seconds_of(device, step, repeats), len(batch)
    return Times(
        step_seconds, text_seconds / pairs, video_seconds / pairs, block_seconds / (rows * columns), inference,
        peak_mib(),
    )  # fmt: skip


def random_batch(module: RetrievalModule, count: int) -> PairBatch:
    """Return matching pairs of a fixed caption and random media with audio, in the method's sizes."""
    generator = torch.Generator().manual_seed(0)
    frames, size = module.frames, module.image_size
    pixels = torch.randint(0, 256, (count, frames, 3, size, size), dtype=torch.uint8, generator=generator)
    audio, encoder = None, getattr(module, "audio_encoder", None)
    if encoder is not None:
        shape = (count, AUDIO_SAMPLES) if "Wav2Vec2" in type(encoder).__name__ else (count, 1, 80, 3000)
        borders = torch.linspace(0, AUDIO_STEPS, frames + 1).long()
        windows = torch.stack([borders[:-1], borders[1:]], dim=1).expand(count, -1, -1).contiguous()
        samples, steps = torch.full((count,), AUDIO_SAMPLES), torch.full((count,), AUDIO_STEPS)
        audio = AudioInput(torch.randn(shape, generator=generator), samples, steps, windows)
    index = torch.arange(count)
    mask = torch.ones(count, frames, dtype=torch.bool)
    media = Media(pixels, mask, audio, None if audio is None else audio.mask)
    extras = {"recover_captions": [[WORDS] * 6 for _ in range(count)]}  # of methods that train on them
    videos = VideoBatch(media, index, [f"video{place}" for place in range(count)])
    return PairBatch(TextBatch([WORDS] * count, index), videos, extras).to(module.device)


def measure_costs(
    module: RetrievalModule,
    batch_size: int = 16,
    queries: int = 1000,
    repeats: int = 3,
    precision: Precision = nullcontext,
) -> Costs:
    """Measure a method on random inputs.

    Args:
        module: Method on its device.
        batch_size: Number of matching pairs per batch.
        queries: Number of texts that a video is scored against.
        repeats: Number of measurements of each time.
        precision: Context of forward passes, such as autocast.
    """
    batch = random_batch(module, batch_size)
    times = measure_times(module, batch, queries, batch_size, repeats, precision)
    # Last, since the attention that can be counted takes more memory than the one that runs.
    flops = _flops(module, batch)
    children = {name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()}
    video_ms, score_ms = 1000 * times.video, 1000 * times.pair * queries
    return Costs(
        parameters=sum(p.numel() for p in module.parameters()),
        trainable=sum(p.numel() for p in module.parameters() if p.requires_grad),
        parameters_by_module={name: count for name, count in children.items() if count},
        flops_by_stage=flops,
        training_step_ms=1000 * times.step,
        encode_video_ms=video_ms,
        encode_text_ms=1000 * times.text,
        score_ms_per_video=score_ms,
        ms_per_video=video_ms + score_ms,
        peak_inference_mib=times.inference_mib,
        peak_training_mib=times.training_mib,
    )


def _flops(module: RetrievalModule, batch: PairBatch) -> dict[str, int]:
    """Return the FLOPs of one batch by stage."""
    encoder, audio_encoder = module.encoder, getattr(module, "audio_encoder", None)

    def count(run: Callable[[], object]) -> int:
        with _counted() as counter:
            run()
        return int(counter.get_total_flops())

    module.eval()
    with torch.no_grad():
        text, video = module.text_features(batch.text).float(), module.video_features(batch.video).float()
        raw_text = count(lambda: encoder.encode_text(batch.text.text, module.words))
        raw_video = count(lambda: encoder.encode_video(batch.video.video, patches=module.needs_patches))
        raw_video += count(lambda: audio_encoder.encode_audio(batch.video.video)) if audio_encoder else 0
        stages = {
            "encode_text": raw_text,
            "encode_video": raw_video,
            "text_layers": count(lambda: module.text_features(batch.text)) - raw_text,
            "video_layers": count(lambda: module.video_features(batch.video)) - raw_video,
            "score": count(lambda: module.score(text, video)),
        }
    module.train()
    stages["training_step"] = count(lambda: batch_loss(module, batch, nullcontext).backward())
    module.zero_grad(set_to_none=True)
    return stages


@contextmanager
def _counted() -> Iterator[FlopCounterMode]:
    """Count FLOPs, with attention and transformer layers in forms that the counter knows."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
