"""What a method costs: parameters, FLOPs, time and memory, on random media of the recipe's sizes; no dataset needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tvr_lightning.data.batch import AudioInput, Media, PairBatch, TextBatch, VideoBatch
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.reproduce.runs.memory import peak_memory_mib
from tvr_lightning.training.gradient_cache import encode_in_chunks
from tvr_lightning.training.optim import build_optimizer

WORDS = "a person walks along the street while a small dog runs beside a red car"
AUDIO_STEPS, AUDIO_SAMPLES = 1500, 480_000
"""Half a minute of sound: vectors of 20 ms, and samples at 16 kHz."""

Precision = Callable[[], AbstractContextManager[Any]]

STAGES = {
    "encode_video": "encoder, videos",
    "encode_text": "encoder, texts",
    "video_layers": "method's layers, per video",
    "text_layers": "method's layers, per text",
    "score": "scoring, all pairs",
    "training_step": "training step, forward and backward",
}
"""What operations are counted in, and how a reader is told."""

DEPTH = 3
"""Names of a module's place in the method whose FLOPs are listed: `encoder.visual.transformer` has three."""


@dataclass
class Costs:
    """What was measured; FLOPs are those of products, convolutions and attention, a multiplication and an addition two.

    Attributes:
        parameters, trainable: how many numbers the method has, and how many of them are trained.
        parameters_by_module: of each direct child.
        flops_by_stage: of one batch: `encode_text`, `encode_video` (encoder, sound included), `text_layers` and
            `video_layers` (the method's own, per item), `score` (all pairs of the batch), and `training_step` (forward
            and backward).
        flops_by_module: of inference on one batch, by the module's dotted name in the method; inner ones are part of
            outer ones.
        training_step_ms: of one optimiser step on a batch, median.
        encode_video_ms, encode_text_ms: of one item as its share of a batch, media in memory, median over batches.
        score_ms_per_video: of scoring all `queries` against one video, media and text encoded.
        ms_per_video: encode_video_ms plus score_ms_per_video: what a further video costs while `queries` texts ask.
        peak_inference_mib, peak_training_mib: on a GPU the most memory allocated; on a CPU the largest resident memory
            of the process until then, Python and libraries included; None where the system does not tell it.
    """

    parameters: int
    trainable: int
    parameters_by_module: dict[str, int]
    flops_by_stage: dict[str, int]
    flops_by_module: dict[str, int]
    training_step_ms: float
    encode_video_ms: float
    encode_text_ms: float
    score_ms_per_video: float
    ms_per_video: float
    peak_inference_mib: float | None
    peak_training_mib: float | None


@dataclass(frozen=True)
class Workload:
    """What is run.

    Attributes:
        batch: B, matching pairs per batch.
        queries: texts that ask while a video is scored.
        repeats: measurements of each time, whose median counts; one more comes before them.
        captions: descriptions per video, for methods that train on them.
    """

    batch: int = 16
    queries: int = 1000
    repeats: int = 3
    captions: int = 6


def random_batch(module: RetrievalModule, workload: Workload) -> PairBatch:
    """Return B pairs of a fixed caption and random media with sound, of the method's sizes.

    Args:
        module: says how many frames, how large, and whether there is an audio encoder.
        workload: says how many.
    """
    generator = torch.Generator().manual_seed(0)
    count, frames, size = workload.batch, module.frames, module.image_size
    pixels = torch.randint(0, 256, (count, frames, 3, size, size), dtype=torch.uint8, generator=generator)
    mask = torch.ones(count, frames, dtype=torch.bool)
    audio = _random_audio(module, count, frames, generator)
    index = torch.arange(count)
    media = Media(pixels, mask, audio, None if audio is None else audio.mask)
    extras = {"recover_captions": [[WORDS] * workload.captions for _ in range(count)]}
    videos = VideoBatch(media, index, [f"video{place}" for place in range(count)])
    return PairBatch(TextBatch([WORDS] * count, index), videos, extras).to(module.device)


def _random_audio(module: RetrievalModule, count: int, frames: int, generator: torch.Generator) -> AudioInput | None:
    encoder = getattr(module, "audio_encoder", None)
    if encoder is None:
        return None
    wave = "Wav2Vec2" in type(encoder).__name__
    shape = (count, AUDIO_SAMPLES) if wave else (count, 1, 80, 3000)
    borders = torch.linspace(0, AUDIO_STEPS, frames + 1).long()
    windows = torch.stack([borders[:-1], borders[1:]], dim=1).expand(count, -1, -1).contiguous()
    return AudioInput(
        torch.randn(shape, generator=generator),
        torch.full((count,), AUDIO_SAMPLES),
        torch.full((count,), AUDIO_STEPS),
        windows,
    )


def measure_costs(module: RetrievalModule, workload: Workload, precision: Precision = nullcontext) -> Costs:
    """Measure a method.

    Args:
        module: on the device where it is to be measured.
        workload: batch, queries, repeats.
        precision: context that forward passes run in, such as autocast; times and memory are those of it.
    """
    batch = random_batch(module, workload)
    # Operations are counted last: the form of attention that can be counted takes more memory than the one that runs.
    _reset_peak(module.device)
    module.eval()
    with torch.no_grad():
        with precision():
            text, video = module.text_features(batch.text), module.video_features(batch.video)
        text_ms = _median_ms(module, workload, lambda: module.text_features(batch.text), precision) / workload.batch
        video_ms = _median_ms(module, workload, lambda: module.video_features(batch.video), precision) / workload.batch
        repeated = _repeated(text, workload.queries)
        score_ms = _median_ms(module, workload, lambda: module.score(repeated, video), precision) / workload.batch
    inference = _peak_mib(module.device)
    _reset_peak(module.device)
    module.train()
    step_ms = _training_ms(module, batch, workload, precision)
    training = _peak_mib(module.device)
    module.eval()
    with torch.no_grad():
        flops, by_module = _inference_flops(module, batch, text.float(), video.float())
    module.train()
    flops["training_step"] = _training_flops(module, batch)
    children = {name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()}
    return Costs(
        parameters=sum(p.numel() for p in module.parameters()),
        trainable=sum(p.numel() for p in module.parameters() if p.requires_grad),
        parameters_by_module={name: count for name, count in children.items() if count},
        flops_by_stage=flops,
        flops_by_module=by_module,
        training_step_ms=step_ms,
        encode_video_ms=video_ms,
        encode_text_ms=text_ms,
        score_ms_per_video=score_ms,
        ms_per_video=video_ms + score_ms,
        peak_inference_mib=inference,
        peak_training_mib=training,
    )


def _inference_flops(
    module: RetrievalModule, batch: PairBatch, text: TextFeatures, video: VideoFeatures
) -> tuple[dict[str, int], dict[str, int]]:
    by_module: dict[str, int] = {}

    def count(run: Callable[[], Any], into: dict[str, int] | None = None) -> int:
        with _counted() as counter, nullcontext() if into is None else _watched(module, counter, into):
            run()
        return int(counter.get_total_flops())

    encoder = module.encoder
    raw_text = count(lambda: encoder.encode_text(batch.text.text, module.words))
    raw_video = count(lambda: encoder.encode_video(batch.video.video, patches=module.needs_patches))
    audio = _audio_flops(module, batch)
    whole_text = count(lambda: module.text_features(batch.text), by_module)
    whole_video = count(lambda: module.video_features(batch.video), by_module)
    stages = {
        "encode_text": raw_text,
        "encode_video": raw_video + audio,
        "text_layers": whole_text - raw_text,
        "video_layers": whole_video - raw_video - audio,
        "score": count(lambda: module.score(text, video), by_module),
    }
    return stages, {name: value for name, value in by_module.items() if value}


@contextmanager
def _counted() -> Iterator[FlopCounterMode]:
    """Count FLOPs with attention in its plain form, of products that the counter knows on every device."""
    # In evaluation torch runs a whole transformer layer as one operation, of which the counter knows nothing.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def _watched(module: RetrievalModule, counter: FlopCounterMode, into: dict[str, int]) -> Iterator[None]:
    """Add the FLOPs of every module's own forward to `into`, by its dotted name in the method."""
    began: list[int] = []
    handles = []
    for name, child in module.named_modules():
        if name and name.count(".") < DEPTH:

            def enter(*_: object) -> None:
                began.append(counter.get_total_flops())

            def leave(*_: object, name: str = name) -> None:
                into[name] = into.get(name, 0) + counter.get_total_flops() - began.pop()

            handles += [child.register_forward_pre_hook(enter), child.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _audio_flops(module: RetrievalModule, batch: PairBatch) -> int:
    encoder = getattr(module, "audio_encoder", None)
    if encoder is None:
        return 0
    with _counted() as counter:
        encoder.encode_audio(batch.video.video)
    return int(counter.get_total_flops())


def _loss(module: RetrievalModule, batch: PairBatch) -> Tensor:
    """As a training step takes it, chunks of the gradient cache included; one device, so nothing is gathered."""
    chunk = module.optimizer_config.gradient_cache
    pairs = encode_in_chunks(module.pair_features, batch, chunk) if chunk else module.pair_features(batch)
    with torch.autocast(module.device.type, enabled=False):
        terms = module.losses(pairs.float())
    return torch.stack([term.reshape(()) for term in terms.values()]).sum()


def _training_flops(module: RetrievalModule, batch: PairBatch) -> int:
    with _counted() as counter:
        _loss(module, batch).backward()
    module.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


def _training_ms(module: RetrievalModule, batch: PairBatch, workload: Workload, precision: Precision) -> float:
    optimizer, scheduler = build_optimizer(module, module.optimizer_config, total_steps=workload.repeats + 1, epochs=1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with precision():
            loss = _loss(module, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()

    return _median_ms(module, workload, step)


def _median_ms(
    module: RetrievalModule, workload: Workload, run: Callable[[], object], precision: Precision = nullcontext
) -> float:
    times = []
    for _ in range(workload.repeats + 1):
        _synchronize(module.device)
        began = time.perf_counter()
        with precision():
            run()
        _synchronize(module.device)
        times.append(1000 * (time.perf_counter() - began))
    return median(times[1:])


def _repeated(text: TextFeatures, queries: int) -> TextFeatures:
    return text[torch.arange(queries, device=text.sentence.device) % len(text)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_mib(device: torch.device) -> float | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return peak_memory_mib()
