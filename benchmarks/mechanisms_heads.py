"""Heads of the methods, trained and evaluated on the synthetic features of mechanisms_worlds.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from mechanisms_worlds import AUDIO, DIMENSION, FRAMES, WORDS, Split, World
from torch import Tensor, nn

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.encoders.whisper import TinyWhisperEncoder
from tvr_lightning.evaluation.evaluator import Evaluation, Evaluator
from tvr_lightning.evaluation.normalization import Normalizer, SinkhornBias
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods import DPDV, GAID, GARE, NCL, TCMGC, TMASS, CLIP4Clip, XPool
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.dpdv.model import Captions
from tvr_lightning.methods.dpdv.options import DPDVOptions
from tvr_lightning.methods.gaid.options import GAIDOptions, NoFusion
from tvr_lightning.methods.gare.options import GAREOptions, NoIncrement
from tvr_lightning.methods.tcmgc.options import TCMGCOptions
from tvr_lightning.methods.tmass import TMASSOptions
from tvr_lightning.methods.xpool import XPoolOptions


@dataclass
class MeanPooled:
    """CLIP4Clip with mean pooling and NCL's queues of 1024 training texts and videos.

    Attributes:
        normalize_loss: Whether to train with NCL's biases.
        detach_biases: Option of `NCL`.
    """

    normalize_loss: bool = False
    detach_biases: bool | None = None


Head = MeanPooled | XPoolOptions | TMASSOptions | TCMGCOptions | GAREOptions | DPDVOptions | GAIDOptions
"""Options of a head; their type identifies the method."""

METHODS: dict[type, tuple[Any, str]] = {
    XPoolOptions: (XPool, "xpool"), TMASSOptions: (TMASS, "tmass"), TCMGCOptions: (TCMGC, "tcmgc"),
    GAREOptions: (GARE, "gare"), DPDVOptions: (DPDV, "dpdv"), GAIDOptions: (GAID, "gaid"),
}  # fmt: skip
TEXT_TO_VIDEO, VIDEO_TO_TEXT = "text_to_video", "video_to_text"
Metrics = dict[str, float]
"""R@1 of both directions in percent, and NCL's normalization errors (Eq. 5) as `..._error`."""


def method(head: Head, encoder: TinyClipEncoder) -> RetrievalModule:
    """Return a method with an encoder that only provides sizes."""
    options: dict[str, Any] = {"words": WORDS, "frames": FRAMES}
    if isinstance(head, MeanPooled):
        contrast = NCL(head.normalize_loss, detach_biases=head.detach_biases, queue_size=1024)
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
        for layer in (self.text, self.video):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def texts(self, text: TextFeatures) -> TextFeatures:
        """Return texts as the method scores them."""
        return self.method.encode_text(replace(text, sentence=self.text(text.sentence), words=self.text(text.words)))

    def videos(self, video: VideoFeatures) -> VideoFeatures:
        """Return videos as the method scores them."""
        patches = None if video.patches is None or not self.method.needs_patches else self.video(video.patches)
        return self.method.encode_video(replace(video, frames=self.video(video.frames), patches=patches))

    def pairs(self, split: Split, rows: Tensor) -> PairedFeatures:
        """Return the pairs in `rows` (B,) of a split for the method's losses."""
        extras: dict[str, Captions] = {}
        if split.captions is not None:
            listed = split.captions[rows]
            extras["captions"] = replace(listed, sentence=self.text(listed.sentence), words=self.text(listed.words))
        return PairedFeatures(self.texts(split.text[rows]), self.videos(split.video[rows]), rows, rows, extras)


def build(head: Head, seed: int) -> Adapted:
    """Return a head with new weights and CLIP's temperature of 0.01."""
    torch.manual_seed(seed)
    encoder = TinyClipEncoder(DIMENSION, image_size=16, text_layers=1, vision_layers=1).requires_grad_(False)
    torch.manual_seed(seed)  # regardless of the random numbers that the encoder has used
    adapted = Adapted(method(head, encoder))
    with torch.no_grad():
        adapted.method.temperature.logit_scale.fill_(math.log(100))
    return adapted


def train(adapted: Adapted, world: World, seed: int, rate: float, ratio: float, steps: int) -> None:
    """Train the maps and the head with AdamW, a cosine schedule, and clipped gradients.

    Args:
        adapted: The maps and the head.
        world: Training pairs.
        seed: Seed for batches and dropout.
        rate: Maximum learning rate of the head.
        ratio: Learning rate of the maps, relative to that of the head.
        steps: Number of optimizer steps.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    maps = [*adapted.text.parameters(), *adapted.video.parameters()]
    rest = [parameter for parameter in adapted.method.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": maps, "lr": ratio * rate}, {"params": rest, "lr": rate}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    rates = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1, pct_start=0.1)
    adapted.train()
    batches: list[Tensor] = []
    for _ in range(steps):
        batches = batches or list(world.batches(generator))
        pairs = adapted.pairs(world.train, batches.pop(0))
        loss = torch.stack([term.reshape(()) for term in adapted.method.losses(pairs).values()]).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*maps, *rest], 1.0)
        optimizer.step()
        schedule.step()
        adapted.method.temperature.clamp()
        adapted.method.update_state(pairs.detach())
    adapted.eval()


def readings(adapted: Adapted, split: Split) -> dict[str, Metrics]:
    """Rank the pairs of a split as `tvr test` does, in every way that the head allows.

    Returns:
        By name: `plain` scores; `training queries` and `oracle` with NCL's biases from the queues or from the ranked
        queries; `bare` texts without GARE's increments; `as released` under a released protocol that leaks.
    """
    found = {"plain": evaluate(adapted, split)}
    match adapted.method:
        case CLIP4Clip():
            found["training queries"] = evaluate(adapted, split, SinkhornBias())
            found["oracle"] = evaluate(adapted, split, SinkhornBias(queries="oracle"))
        case GARE() if not isinstance(adapted.method.options.increment, NoIncrement):
            psi, adapted.method.head.psi = adapted.method.head.psi, None
            found["bare"] = evaluate(adapted, split)
            adapted.method.head.psi = psi
        case GAID() | TMASS():
            found["as released"] = evaluate(adapted, split, released=True)
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


def outcome(
    head: Head, world: World, seed: int, rate: float, ratio: float, steps: int
) -> dict[str, dict[str, Metrics]]:
    """Build and train a head, and return its readings on the `validation` and the `test` pairs."""
    adapted = build(head, seed)
    train(adapted, world, seed, rate, ratio, steps)
    return {"validation": readings(adapted, world.validation), "test": readings(adapted, world.test)}
