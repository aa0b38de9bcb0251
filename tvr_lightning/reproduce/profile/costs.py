"""Costs of a method: parameters, FLOPs, time, and memory of a batch, and the card of a profile on random inputs."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import pandas as pd
import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.data.batch import AudioInput, Media, PairBatch, TextBatch, VideoBatch
from tvr_lightning.encoders.pretrained import weights_follow
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import memory_budget
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.results import environment
from tvr_lightning.features import FeatureBatch
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.progress import shown
from tvr_lightning.reproduce.runs.card import peak_memory_mib, read_record
from tvr_lightning.training.gradient_cache import encode_in_chunks
from tvr_lightning.training.optim import build_optimizer

STAGES = {
    "encode_video": "encoder, videos", "encode_text": "encoder, texts",
    "video_layers": "method's layers, per video", "text_layers": "method's layers, per text",
    "score": "scoring, all pairs", "training_step": "training step, forward and backward",
}  # fmt: skip
WORDS = "a person walks along the street while a small dog runs beside a red car"
STEPS, SAMPLES = 1500, 480_000  # of 30 s of audio: vectors of 20 ms, and samples at 16 kHz
Precision = Callable[[], AbstractContextManager[Any]]
R = TypeVar("R", bound=FeatureBatch)


@dataclass
class Costs:
    """Measured costs; FLOPs are those of products, convolutions, and attention, two per multiplication and addition.

    Times are in milliseconds: an optimizer step, one item as its share of a batch, and all queries against one video.
    Memory is the maximum allocated on a GPU; on a CPU, the maximum of the process so far; None if unknown.
    """

    parameters: int
    trainable: int
    training_step_ms: float
    encode_video_ms: float
    encode_text_ms: float
    score_ms_per_video: float
    peak_inference_mib: float | None
    peak_training_mib: float | None
    flops_by_stage: dict[str, int] = field(default_factory=dict)


@dataclass
class ProfileCard:
    """Record of one profile, a JSON file in `profiles/` next to the run cards."""

    name: str  # <method>-<encoder>; name of the file
    method: str
    encoder: str  # class and architecture
    options: dict[str, Any]
    batch: int
    queries: int
    repeats: int  # measurements of each time
    precision: str
    costs: Costs
    environment: dict[str, Any]  # versions, git state, machine, device, and date
    schema: int = 6


def read_profiles(folder: Path) -> list[ProfileCard]:
    """Read all profiles of a folder, sorted by name; raise UserError if one is unusable."""
    fix = "delete it and rerun `tvr profile`"
    found = [read_record(path, ProfileCard, fix) for path in sorted(folder.glob("*.json"))]
    return [ProfileCard(**raw | {"costs": Costs(**raw["costs"])}) for raw in found]


def profile_table(profiles: Sequence[ProfileCard]) -> pd.DataFrame:
    """Return one row per profile, as text, with its name as index."""
    rows = {}
    for profile in profiles:
        costs = profile.costs
        flops = costs.flops_by_stage
        # Scoring is counted over all pairs of the batch, the rest over its items.
        items = sum(flops[stage] for stage in STAGES if stage not in ("training_step", "score"))
        values = {
            "parameters, M": costs.parameters / 1e6,
            "FLOPs of one pair's inference, G": (items / profile.batch + flops["score"] / profile.batch**2) / 1e9,
            **{f"GFLOPs, {words}": flops[stage] / 1e9 for stage, words in STAGES.items()},
            "step, ms": costs.training_step_ms,
            "ms per text": costs.encode_text_ms,
            "ms per video": costs.encode_video_ms + costs.score_ms_per_video,
            "MiB, inference": costs.peak_inference_mib,
            "MiB, training": costs.peak_training_mib,
            "trained, M": costs.trainable / 1e6,
        }
        first = {"method": profile.method, "encoder": profile.encoder, "device": str(profile.environment["device"])}
        texts = {name: "-" if value is None else f"{value:.2f}" for name, value in values.items()}
        rows[profile.name] = first | {"batch": str(profile.batch)} | texts
    return pd.DataFrame.from_dict(rows, orient="index")


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a call, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])


def measure_costs(
    module: RetrievalModule,
    batch: PairBatch,
    queries: int,
    videos: int,
    repeats: int = 3,
    precision: Precision = nullcontext,
) -> Costs:
    """Measure a training step, encoding an item, and scoring a pair in the blocks of an evaluation of N x M pairs.

    Each time is the median of `repeats`; `precision` is the context of forward passes, such as autocast.
    """
    device = module.device

    def encode(features: Callable[[Any], Any], items: FeatureBatch) -> Any:
        with precision():  # again in every call, since autocast keeps the weights that it casts until its end
            return features(items)

    def milliseconds(run: Callable[[], object]) -> float:
        return 1000 * median_seconds(run, device, repeats)

    def peak_mib() -> float | None:  # on a GPU, since the last call
        if device.type != "cuda":
            return peak_memory_mib()
        peak = torch.cuda.max_memory_allocated(device) / 2**20
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        batch_loss(module, batch, precision).backward()
        optimizer.step()

    peak_mib()
    module.eval()
    with torch.no_grad():
        text = encode(module.text_features, batch.text).float()
        video = encode(module.video_features, batch.video).float()
        text_ms = milliseconds(lambda: encode(module.text_features, batch.text)) / len(batch)
        video_ms = milliseconds(lambda: encode(module.video_features, batch.video)) / len(batch)
        # Views of one item, since only their sizes count.
        every_text = text[:1].apply(lambda tensor: tensor.expand(queries, *tensor.shape[1:]))
        every_video = video[:1].apply(lambda tensor: tensor.expand(videos, *tensor.shape[1:]))
        budget = memory_budget(module.evaluation_config.memory_gib, device)
        blocks = PairScores(module.score, every_text, every_video, memory_budget_bytes=budget, device=device)
        some = repeated(text, min(blocks.block_texts, queries))
        few = repeated(video, min(blocks.block_videos, videos))
        score_ms = milliseconds(lambda: module.score(some, few)) * queries / (len(some) * len(few))
    inference_mib = peak_mib()
    module.train()
    optimizer, _ = build_optimizer(module, module.optimizer_config, total_steps=100, epochs=1)
    step_ms = milliseconds(step)
    parameters = sum(p.numel() for p in module.parameters())
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return Costs(parameters, trainable, step_ms, video_ms, text_ms, score_ms, inference_mib, peak_mib())


def repeated(record: R, count: int) -> R:
    """Return that many items, the given ones over and over."""
    return record[torch.arange(count) % len(record)]


def batch_loss(module: RetrievalModule, batch: PairBatch, precision: Precision) -> Tensor:
    """Return the loss of a training step on one device, with the chunks of its gradient cache."""
    chunk = module.optimizer_config.gradient_cache
    with precision():
        pairs = encode_in_chunks(module.pair_features, batch, chunk) if chunk else module.pair_features(batch)
    with torch.autocast(module.device.type, enabled=False):
        terms = module.contrast.terms(module.losses, pairs.float())
    return torch.stack([term.reshape(()) for term in terms.values()]).sum()


def count_flops(module: RetrievalModule, batch: PairBatch) -> dict[str, int]:
    """Return the FLOPs of one batch by stage; attention that can be counted takes more memory than the one used."""
    encoder, audio_encoder = module.encoder, getattr(module, "audio_encoder", None)
    module.eval()
    with torch.no_grad():
        text, video = module.text_features(batch.text).float(), module.video_features(batch.video).float()
        raw_text = _flops(lambda: encoder.encode_text(batch.text.text, module.words))
        raw_video = _flops(lambda: encoder.encode_video(batch.video.video, patches=module.needs_patches))
        raw_video += _flops(lambda: audio_encoder.encode_audio(batch.video.video)) if audio_encoder else 0
        stages = {
            "encode_text": raw_text,
            "encode_video": raw_video,
            "text_layers": _flops(lambda: module.text_features(batch.text)) - raw_text,
            "video_layers": _flops(lambda: module.video_features(batch.video)) - raw_video,
            "score": _flops(lambda: module.score(text, video)),
        }
    module.train()
    stages["training_step"] = _flops(lambda: batch_loss(module, batch, nullcontext).backward())
    module.zero_grad(set_to_none=True)
    return stages


def _flops(run: Callable[[], object]) -> int:
    """Count FLOPs, with attention and transformer layers in forms that the counter knows."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return int(counter.get_total_flops())


def build_untrained(recipe: Recipe) -> Namespace:
    """Build a recipe whose encoders have random weights."""
    model = recipe.config.model
    for option in list(model.keys()):
        if re.fullmatch(r"init_args\.(\w+\.init_args\.)*weights", option):  # of the encoders, not in a method's options
            model[option] = None
    with weights_follow():  # for encoders that a recipe leaves to its method
        return recipe.build()


def profile(recipe: Recipe, batch_size: int, queries: int, repeats: int, device: str | None) -> ProfileCard:
    """Measure a recipe's method with random weights on random inputs of its sizes, and print the costs."""
    recipe.check_trainer()
    built = build_untrained(recipe)
    module = built.model
    if not isinstance(module, RetrievalModule):
        raise UserError(f"tvr profile measures retrieval methods, not {type(module).__name__}")
    own = built.trainer
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, precision=own.precision, plugins=own.plugins
    )
    plugin = trainer.precision_plugin
    plugin.convert_module(module.to(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    with shown("profile: measuring"):
        batch = random_batch(module, batch_size)
        costs = measure_costs(module, batch, queries, batch_size, repeats, plugin.forward_context)
        costs.flops_by_stage = count_flops(module, batch)
    encoder = " ".join(filter(None, (type(module.encoder).__name__, getattr(module.encoder, "name", None))))
    name = re.sub(r"[^a-z0-9]+", "-", f"{module.title} {encoder}".lower()).strip("-")
    card = ProfileCard(
        name, module.title, encoder, recipe.plain()["model"], batch_size, queries, repeats, str(trainer.precision),
        costs, {**environment(), "device": str(module.device)},
    )  # fmt: skip
    print(profile_table([card]).T.to_string())
    return card


def random_batch(
    module: RetrievalModule, count: int, seed: int = 0, samples: int = SAMPLES, steps: int = STEPS
) -> PairBatch:
    """Return matching pairs of a fixed caption and random media with audio, in the method's sizes."""
    generator = torch.Generator().manual_seed(seed)
    frames = module.frames
    size = module.encoder.image_size
    index = torch.arange(count)
    pixels = torch.randint(0, 256, (count, frames, 3, size, size), dtype=torch.uint8, generator=generator)
    mask = torch.ones(count, frames, dtype=torch.bool)
    times = torch.arange(float(frames)).expand(count, frames)
    media = Media(pixels, mask) if module.encoder.preparation.is_square else Media(list(pixels), mask, times=times)
    if (encoder := getattr(module, "audio_encoder", None)) is not None:
        shape = (count, 1, 80, 3000) if encoder.kind == "whisper" else (count, samples)
        borders = torch.linspace(0, steps, frames + 1).long()
        windows = torch.stack([borders[:-1], borders[1:]], dim=1).expand(count, -1, -1).contiguous()
        waveforms = 0.1 * torch.randn(shape, generator=generator)
        sizes = torch.full((count,), samples), torch.full((count,), steps)
        media.audio = AudioInput(waveforms, *sizes, windows, [steps] * count)
    extras = {"recover_captions": [[WORDS] * 6 for _ in range(count)]}  # of methods that train on them
    videos = VideoBatch(media, index, [f"video{place}" for place in range(count)])
    return PairBatch(TextBatch([WORDS] * count, index), videos, extras).to(module.device)
