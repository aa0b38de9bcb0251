"""Heads of the methods, trained and evaluated on the synthetic features of mechanisms_settings.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from mechanisms_settings import AUDIO, BATCH, DIMENSION, FRAMES, LENGTH, WORDS, Setting, Split
from torch import Tensor, nn

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.encoders.whisper import TinyWhisperEncoder
from tvr_lightning.evaluation.evaluator import Evaluation, Evaluator
from tvr_lightning.evaluation.normalization import Normalizer, SinkhornBias
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods import DPDV, GAID, GARE, NCL, TCMGC, TMASS, CLIP4Clip, XPool
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.dpdv.options import DPDVOptions
from tvr_lightning.methods.gaid.options import GAIDOptions, NoFusion
from tvr_lightning.methods.gare.options import GAREOptions
from tvr_lightning.methods.tcmgc.options import TCMGCOptions
from tvr_lightning.methods.tmass import TMASSOptions
from tvr_lightning.methods.xpool import XPoolOptions


@dataclass
class MeanPooled:
    """CLIP4Clip with mean pooling and NCL's queues of training texts and videos.

    Attributes:
        normalize_loss: Whether to train with NCL's biases.
        detach_biases: Option of `NCL`.
    """

    normalize_loss: bool = False
    detach_biases: bool | None = None


Head = MeanPooled | XPoolOptions | TMASSOptions | TCMGCOptions | GAREOptions | DPDVOptions | GAIDOptions
"""Options of a head; their type identifies the method."""
Addition = Literal[
    "text vector", "text layer", "constant query", "constant gate", "constant weights", "random caption", "noisy text"
]


@dataclass
class Control:
    """Head with as much capacity or data as a method, but without its idea.

    It has a learned vector or linear layer for all sentences; a learned query, a fixed gate of 0.5, or learned weights
    of the contrasts instead of ones that depend on the pair; a random caption of the video in each step; or noise on
    the training sentences, as long as that of `noisy sentences`.
    """

    head: Head
    addition: Addition


@dataclass(frozen=True)
class Job:
    """One head to train.

    Attributes:
        rate: Maximum learning rate of the head.
        maps: Maximum learning rate of the maps that replace the encoders.
        queue: Number of training texts and of training videos in NCL's queues.
        readings: Names of `readings` to evaluate.
    """

    setting: str
    strength: float
    head: Head | Control
    seed: int
    rate: float
    maps: float
    pairs: int
    queue: int
    epochs: int
    readings: tuple[str, ...] = ("plain",)


METHODS: dict[type, tuple[Any, str]] = {
    XPoolOptions: (XPool, "xpool"), TMASSOptions: (TMASS, "tmass"), TCMGCOptions: (TCMGC, "tcmgc"),
    GAREOptions: (GARE, "gare"), DPDVOptions: (DPDV, "dpdv"), GAIDOptions: (GAID, "gaid"),
}  # fmt: skip
TEXT_TO_VIDEO, VIDEO_TO_TEXT = "text_to_video", "video_to_text"
Metrics = dict[str, float]
"""R@1 of both directions in percent, and NCL's normalization errors (Eq. 5) as `..._error`."""


def method(head: Head, encoder: TinyClipEncoder, queue: int) -> RetrievalModule:
    """Return a method with an encoder that only provides sizes."""
    options: dict[str, Any] = {"words": WORDS, "frames": FRAMES}
    if isinstance(head, MeanPooled):
        contrast = NCL(head.normalize_loss, detach_biases=head.detach_biases, queue_size=queue)
        return CLIP4Clip(encoder, contrast=contrast, **options)
    if isinstance(head, GAIDOptions):
        options["audio_encoder"] = _sound_encoder(head)
    kind, section = METHODS[type(head)]
    made: RetrievalModule = kind(encoder, **{section: head}, **options)
    return made


def _sound_encoder(head: GAIDOptions) -> TinyWhisperEncoder | None:
    """Return an audio encoder that only provides its size."""
    if isinstance(head.fusion, NoFusion):
        return None
    encoder = TinyWhisperEncoder(AUDIO)
    for parameter in encoder.parameters():
        parameter.requires_grad_(False)
    return encoder


class Adapted(nn.Module):
    """A method after one linear map per modality, which replaces the encoder and is trained with it."""

    def __init__(self, method: RetrievalModule) -> None:
        super().__init__()
        self.method = method
        self.text, self.video = nn.Linear(DIMENSION, DIMENSION), nn.Linear(DIMENSION, DIMENSION)
        self.addition: nn.Module | None = None
        self.random_captions, self.text_noise = False, 0.0
        for layer in (self.text, self.video):
            _as_identity(layer)

    def texts(self, text: TextFeatures) -> TextFeatures:
        """Return texts as the method scores them."""
        sentence = self.text(text.sentence)
        sentence = sentence if self.addition is None else self.addition(sentence)
        return self.method.encode_text(replace(text, sentence=sentence, words=self.text(text.words)))

    def videos(self, video: VideoFeatures) -> VideoFeatures:
        """Return videos as the method scores them."""
        patches = None if video.patches is None or not self.method.needs_patches else self.video(video.patches)
        return self.method.encode_video(replace(video, frames=self.video(video.frames), patches=patches))

    def pairs(self, split: Split, rows: Tensor) -> PairedFeatures:
        """Return the pairs in `rows` (B,) of a split for the method's losses."""
        text, extras = split.text[rows], {}
        if split.captions is not None:
            listed = split.captions[rows]
            extras["captions"] = replace(listed, sentence=self.text(listed.sentence), words=self.text(listed.words))
            if self.random_captions:
                one = torch.arange(len(rows)), torch.multinomial(listed.mask.float(), 1).squeeze(1)
                text = TextFeatures(listed.sentence[one], listed.words[one], listed.word_mask[one])
        if self.text_noise:
            text = replace(text, sentence=text.sentence + self.text_noise * torch.randn_like(text.sentence))
        return PairedFeatures(self.texts(text), self.videos(split.video[rows]), rows, rows, extras)


def build(head: Head | Control, seed: int, queue: int) -> Adapted:
    """Return a head with new weights and CLIP's temperature of 0.01."""
    torch.manual_seed(seed)
    encoder = TinyClipEncoder(DIMENSION, image_size=16, text_layers=1, vision_layers=1).requires_grad_(False)
    torch.manual_seed(seed)  # regardless of the random numbers that the encoder has used
    adapted = Adapted(method(head.head if isinstance(head, Control) else head, encoder, queue))
    with torch.no_grad():
        adapted.method.temperature.logit_scale.fill_(math.log(100))
    if isinstance(head, Control):
        change(adapted, head.addition)
    return adapted


def change(adapted: Adapted, addition: Addition) -> None:
    """Turn a head into a control."""
    inner: Any = getattr(adapted.method, "head", None)
    match addition:
        case "text vector":
            adapted.addition = LearnedVector(torch.zeros(DIMENSION))
        case "text layer":
            adapted.addition = _as_identity(nn.Linear(DIMENSION, DIMENSION))
        case "constant query":
            inner.query = nn.Parameter(torch.randn(1, inner.slots, DIMENSION))
            prepare = inner.prepare

            def constant(text: TextFeatures, video: VideoFeatures) -> tuple[Any, VideoFeatures]:
                prepared, video = prepare(text, video)
                return replace(
                    prepared, queries=inner.attention.queries(inner.query).expand_as(prepared.queries)
                ), video

            inner.prepare = constant
        case "constant gate":
            for parameter in inner.gate.parameters():
                nn.init.zeros_(parameter.requires_grad_(False))
        case "constant weights":
            inner.lsa = ConstantWeights(len(inner.options.contrasts))
        case "random caption":
            adapted.random_captions = True
        case "noisy text":
            adapted.text_noise = 0.3 * LENGTH / DIMENSION**0.5


class LearnedVector(nn.Module):
    """Add a learned vector (D,)."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.vector = nn.Parameter(start)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the sums (N, D)."""
        return vectors + self.vector


class ConstantWeights(nn.Module):
    """Weights of the contrasts that are learned, but do not depend on their scores."""

    def __init__(self, contrasts: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(contrasts))

    def forward(self, scores: Tensor) -> Tensor:
        """Return weights (G, N, M) that add up to 1 over the G scores (G, N, M) of every pair."""
        return self.logits.softmax(0)[:, None, None].expand_as(scores)


def _as_identity(layer: nn.Linear) -> nn.Linear:
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def train(adapted: Adapted, setting: Setting, job: Job) -> None:
    """Train the maps and the head with AdamW, a cosine schedule, and clipped gradients."""
    generator = torch.Generator().manual_seed(job.seed)
    torch.manual_seed(job.seed)
    maps = [*adapted.text.parameters(), *adapted.video.parameters()]
    slow = {id(parameter) for parameter in maps}
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    rest = [parameter for parameter in trained if id(parameter) not in slow]
    groups: list[dict[str, Any]] = [{"params": maps, "lr": job.maps}, {"params": rest, "lr": job.rate}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.01)
    rates = [group["lr"] for group in optimizer.param_groups]
    steps = job.epochs * job.pairs // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1, pct_start=0.1)
    adapted.train()
    batches: list[Tensor] = []
    for _ in range(steps):
        batches = batches or list(setting.batches(generator))
        pairs = adapted.pairs(setting.train, batches.pop(0))
        loss = torch.stack([term.reshape(()) for term in adapted.method.losses(pairs).values()]).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        adapted.method.temperature.clamp()
        adapted.method.update_state(pairs.detach())
    adapted.eval()


def readings(adapted: Adapted, split: Split, names: Sequence[str]) -> dict[str, Metrics]:
    """Rank the pairs of a split as `tvr test` does, in several ways.

    Args:
        adapted: The maps and the head.
        split: The pairs.
        names: `plain` scores; `training queries` or `oracle` with NCL's biases from the queues or from the ranked
            queries; `bare` texts without GARE's increments; `as released` under a released protocol that leaks.
    """
    found = {}
    for name in names:
        match name:
            case "training queries":
                found[name] = evaluate(adapted, split, SinkhornBias())
            case "oracle":
                found[name] = evaluate(adapted, split, SinkhornBias(queries="oracle"))
            case "bare":
                inner: Any = adapted.method.head
                psi, inner.psi = inner.psi, None
                found[name] = evaluate(adapted, split)
                inner.psi = psi
            case _:
                found[name] = evaluate(adapted, split, released=name == "as released")
    return found


@torch.no_grad()
def evaluate(adapted: Adapted, split: Split, normalizer: Normalizer | None = None, released: bool = False) -> Metrics:
    """Rank the pairs of a split once."""
    method, rows = adapted.method, torch.arange(len(split.text))
    evaluator = Evaluator(
        None if released else method.score,
        score_as_released=method.score_as_released if released else None,
        temperature=method.score_temperature(),
        measure_balance=True,
    )
    bank = method.bank() if normalizer is not None and normalizer.needs_bank else None
    truth = GroundTruth(rows, len(rows), "synthetic features", "test", "one caption per video")
    found: Evaluation = evaluator.evaluate(
        adapted.texts(split.text), rows, adapted.videos(split.video), rows, truth, normalizer, bank
    )
    return {
        TEXT_TO_VIDEO: found.text_to_video["R@1"],
        VIDEO_TO_TEXT: found.video_to_text["R@1"],
        f"{TEXT_TO_VIDEO}_error": found.balance["text-to-video"].error,
        f"{VIDEO_TO_TEXT}_error": found.balance["video-to-text"].error,
    }


def outcome(job: Job, setting: Setting) -> dict[str, dict[str, Metrics]]:
    """Build and train a head, and return its readings on the `validation` and the `test` pairs."""
    adapted = build(job.head, job.seed, job.queue)
    train(adapted, setting, job)
    return {
        "validation": readings(adapted, setting.validation, job.readings),
        "test": readings(adapted, setting.test, job.readings),
    }
