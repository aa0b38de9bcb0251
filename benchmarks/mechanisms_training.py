"""Train a method's head on a synthetic world's features, and rank its test pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from mechanisms_worlds import AUDIO, BATCH, DIMENSION, Split, World
from torch import Tensor, nn

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.encoders.whisper import TinyWhisperEncoder
from tvr_lightning.evaluation.evaluator import Evaluation, Evaluator
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods.base import Protocol, RetrievalModule
from tvr_lightning.methods.dpdv.captions import Captions

EPOCHS, LEARNING_RATE = 8, 1e-3
Build = Callable[[TinyClipEncoder], RetrievalModule]


@dataclass
class Outcome:
    """What one trained head does on the test pairs, in percent; balance errors as NCL defines them (Eq. 5).

    Attributes:
        text_to_video, video_to_text: R@1.
        text_to_video_error, video_to_text_error: normalisation errors.
        released: R@1 from text to video under the method's released protocol, where it has one that leaks.
    """

    text_to_video: float
    video_to_text: float
    text_to_video_error: float
    video_to_text_error: float
    released: float | None = None


class Adapted(nn.Module):
    """A method behind one linear map per modality, which stands for the encoder that would train with it.

    Args:
        method: its encoder gives the sizes and nothing else.
    """

    def __init__(self, method: RetrievalModule) -> None:
        super().__init__()
        self.method = method
        self.text, self.video = nn.Linear(DIMENSION, DIMENSION), nn.Linear(DIMENSION, DIMENSION)
        for layer in (self.text, self.video):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def texts(self, text: TextFeatures) -> TextFeatures:
        """Return N texts as the method scores them."""
        return self.method.encode_text(replace(text, sentence=self.text(text.sentence), words=self.text(text.words)))

    def videos(self, video: VideoFeatures) -> VideoFeatures:
        """Return M videos as the method scores them."""
        patches = None if video.patches is None or not self.method.needs_patches else self.video(video.patches)
        return self.method.encode_video(replace(video, frames=self.video(video.frames), patches=patches))

    def pairs(self, split: Split, rows: Tensor) -> PairedFeatures:
        """Return the pairs at `rows` (B,) of a split as the method's losses take them."""
        extras: dict[str, Captions] = {}
        if split.captions is not None:
            listed = split.captions[rows]
            extras["captions"] = replace(listed, sentence=self.text(listed.sentence), words=self.text(listed.words))
        return PairedFeatures(self.texts(split.text[rows]), self.videos(split.video[rows]), rows, rows, extras)


def build(make: Build, seed: int) -> Adapted:
    """Return a method from fresh weights, at CLIP's temperature of 0.01, with an encoder that only says its sizes."""
    torch.manual_seed(seed)
    encoder = TinyClipEncoder(DIMENSION, image_size=16, text_layers=1, vision_layers=1, freeze="all")
    torch.manual_seed(seed)  # an encoder may draw otherwise than another version's; heads then still start alike
    adapted = Adapted(make(encoder))
    with torch.no_grad():
        adapted.method.temperature.logit_scale.fill_(math.log(100))
    return adapted


def train(adapted: Adapted, world: World, seed: int, epochs: int = EPOCHS) -> None:
    """Train adapters and head with AdamW, a cosine schedule and clipped gradients."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)
    steps = epochs * math.ceil(len(world.train.text) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    adapted.train()
    for _ in range(epochs):
        for rows in world.batches(generator):
            pairs = adapted.pairs(world.train, rows)
            loss = torch.stack([term.reshape(()) for term in adapted.method.losses(pairs).values()]).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            adapted.method.temperature.clamp()
            adapted.method.update_state(pairs.detach())
    adapted.eval()


@torch.no_grad()
def evaluate(adapted: Adapted, world: World, protocol: Protocol = "query") -> Evaluation:
    """Rank the test pairs as `tvr test` does, with the method's own score normalisation."""
    method, test = adapted.method, world.test
    rows = torch.arange(len(test.text))
    released = protocol == "as-released"
    evaluator = Evaluator(
        None if released else method.score,
        score_as_released=method.score_as_released if released else None,
        temperature=method.score_temperature(),
        measure_balance=True,
    )
    normalizer = method.evaluation_config.normalization
    bank = method.bank() if normalizer is not None and normalizer.needs_bank else None
    truth = GroundTruth(rows, len(rows), "synthetic features", "test", "one caption per video")
    return evaluator.evaluate(adapted.texts(test.text), rows, adapted.videos(test.video), rows, truth, normalizer, bank)


def run(make: Build, world: World, seed: int, epochs: int = EPOCHS, released: bool = False) -> Outcome:
    """Build, train and evaluate one head.

    Args:
        make: builds the method around an encoder.
        world: features.
        seed: of weights, dropout and batches.
        epochs: of training.
        released: also evaluate the same weights under the released protocol, which leaks.
    """
    adapted = build(make, seed)
    train(adapted, world, seed, epochs)
    found = evaluate(adapted, world)
    leaked = evaluate(adapted, world, "as-released").text_to_video["R@1"] if released else None
    return Outcome(
        found.text_to_video["R@1"],
        found.video_to_text["R@1"],
        found.balance["text-to-video"].error,
        found.balance["video-to-text"].error,
        leaked,
    )


def sound_encoder() -> TinyWhisperEncoder:
    """Return an audio encoder that only says its size; worlds bring audio features of this size."""
    encoder = TinyWhisperEncoder(AUDIO)
    for parameter in encoder.parameters():
        parameter.requires_grad_(False)
    return encoder
