"""Features, training steps and runs that the tests of methods share."""

import functools
import json
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from tvr_lightning.cli import main
from tvr_lightning.data.batch import Media, VideoBatch
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods.dpdv.model import Captions
from tvr_lightning.pairwise import DensePairVectors, PairVectors

RECIPES = Path(__file__).parents[2] / "recipes"
FORMS = {"factorized": PairVectors, "dense": DensePairVectors}
WORDS, FRAMES, WIDTH = 6, 4, 64
DOUBLE = {"dtype": torch.double}


@functools.cache
def encoder(dtype=torch.float32):
    sizes = {"image_size": 32, "patch_size": 8, "text_layers": 4, "vision_layers": 1, "context_length": 20}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TinyClipEncoder(width=WIDTH, **sizes).to(dtype)


DEFAULTS = {"tcmgc": {"keep_rate": 0.5}, "dpdv": {"captions": 3}}


def build(kind, options, dtype=torch.double):
    torch.manual_seed(0)
    name = kind.__name__.lower()
    options_class, _ = get_args(get_type_hints(kind.__init__)[name])  # or None
    section = {name: options_class(**DEFAULTS.get(name, {}) | options)}
    method = kind(encoder(dtype), words=WORDS, frames=FRAMES, **section).to(dtype)
    torch.manual_seed(1)
    own = [p for name, p in method.named_parameters() if name.startswith(("head.", "cross.")) and p.requires_grad]
    for parameter in own:
        parameter.data += 0.1 * torch.randn_like(parameter)
    return method


def features(texts=5, videos=4, *, words=WORDS, frames=FRAMES, width=WIDTH, patches=0, seed=0, dtype=torch.float32):
    """Random features of texts and videos of different lengths, with audio, patches, and frames before any layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    word_mask = torch.arange(words) < words - torch.arange(texts)[:, None] * 2 % (words - 1)
    frame_mask = torch.arange(frames) < frames - torch.arange(videos)[:, None] % frames
    text = TextFeatures(draw(texts, width), draw(texts, words, width), word_mask)
    shown, heard, before = (draw(videos, frames, width) for _ in range(3))
    shown_patches = draw(videos, frames, patches, width) if patches else None
    return text, VideoFeatures(shown, frame_mask, shown_patches, clip_frames=before, audio=heard, audio_mask=frame_mask)


def captioned(videos, captions, *, words=WORDS, seed=2, dtype=torch.float32):
    """Random captions of videos, of different lengths."""
    text, _ = features(videos * captions, 1, words=words, seed=seed, dtype=dtype)
    return Captions.of(text, torch.ones(videos, captions, dtype=torch.bool))


def black_videos(count, frames=FRAMES):
    """A batch of videos of black frames, `video0` and so on."""
    media = Media(torch.zeros(count, frames, 3, 32, 32, dtype=torch.uint8), torch.ones(count, frames, dtype=torch.bool))
    return VideoBatch(media, torch.arange(count), [f"video{i}" for i in range(count)])


def paired(text, video, **extras):
    index = torch.arange(len(text))
    return PairedFeatures(text, video, index, index, extras)


def moved(module, by=0.2, seed=1):
    """Move the parameters of a module away from their initial values, at which many of them have no effect."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += by * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return module


def close(found, expected, **tolerance):
    """Assert that two sequences of tensors are equal up to rounding."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def descend(loss, parameters, steps=10, lr=3e-3):
    """Take steps of Adam; return the losses. Every parameter must get a finite gradient."""
    optimizer = torch.optim.Adam(parameters.values(), lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        without = [name for name, parameter in parameters.items() if parameter.grad is None]
        assert not without
        assert all(parameter.grad.isfinite().all() for parameter in parameters.values())
        optimizer.step()
        losses.append(value.item())
    return losses


def run(command, recipes, root, runs, *options):
    """Run a command of `tvr` with recipes on a synthetic dataset; return the folder of its results and the results."""
    configs = [f"--config={RECIPES / name}.yaml" for name in recipes]
    places = [f"--data.init_args.root={root}", f"--results.directory={runs}", "--trainer.accelerator=cpu"]
    assert main([command, *configs, *places, *options]) == 0
    path = max(runs.glob("*/version_*/results.json"), key=lambda path: path.stat().st_mtime_ns)
    return path.parent, json.loads(path.read_text())


SMALL = (
    "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", "--trainer.log_every_n_steps=1",
    "--data.init_args.num_workers=0", "--data.init_args.batch_size=8", "--data.init_args.frames=4",
    "--model.init_args.encoder.init_args.width=64",
)  # fmt: skip
"""Options of `run` for a short run of a small model."""
