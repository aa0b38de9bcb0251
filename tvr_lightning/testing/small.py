"""Small methods for tests, built from their recipes with a tiny encoder, random pairs and synthetic data."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import AudioInput, Media, PairBatch, TextBatch, VideoBatch
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.synthetic import synthesize
from tvr_lightning.training.checkpoints import find_class

WORDS, FRAMES, SIDE, BATCH = 12, 4, 32, 8
COLOURS, SHAPES = ("red", "green", "blue", "white"), ("ball", "box")


def method_recipes(folder: Path) -> dict[str, Path]:
    """Return one recipe per retrieval method and contrast in a folder, by title.

    Args:
        folder: Folder of the recipes; of several recipes with the same title, the one with the shortest name is used.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.yaml"), key=lambda path: (len(path.stem), path.stem)):
        model = read_recipe(path).get("model") or {}
        kind = find_class(path, str(model["class_path"])) if "class_path" in model else None
        if kind is not None and issubclass(kind, RetrievalModule):
            contrast = (model.get("init_args") or {}).get("contrast")
            title = f"{contrast['class_path']} on {kind.__name__}" if contrast else kind.__name__
            found.setdefault(title, path)
    return dict(sorted(found.items()))


@functools.cache
def synthetic_data() -> tempfile.TemporaryDirectory[str]:
    """Write a synthetic MSR-VTT of a few videos, once per process; it is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="tvr-methods-")
    synthesize("msrvtt", Path(folder.name), 60, 0, workers=1, progress=False)
    return folder


def small(recipe: Path, *overrides: str) -> tuple[RetrievalModule, TextVideoDataModule]:
    """Build a recipe's method, small and with seeded random weights, and its data.

    Args:
        recipe: Recipe of the method.
        overrides: Options as on the command line, such as `--model.init_args.gather=local`.
    """
    encoder = {"width": 64, "image_size": SIDE, "patch_size": 8, "text_layers": 4, "vision_layers": 1}
    same = {"freeze": "none", "encoder_precision": "float32"}
    data = {"frames": FRAMES, "words": WORDS, "batch_size": BATCH, "eval_batch_size": 5, "num_workers": 0}
    overlay = {
        "model": {"init_args": {"encoder": {"class_path": "TinyClipEncoder", "init_args": {**encoder, **same}}}},
        "data": {"class_path": "MSRVTT", "init_args": {"root": synthetic_data().name, **data, "augmentation": "none"}},
    }
    torch.manual_seed(0)
    return from_recipe([recipe, json.dumps(overlay)], overrides)


def random_pairs(method: RetrievalModule, items: int, seed: int = 0) -> PairBatch:
    """Return B pairs of captions and random clips of the method's sizes, with audio and descriptions.

    Every third clip is missing its last frame; captions are short, long, and longer than the method's maximum.

    Args:
        method: Method that determines number and size of the frames and the kind of audio.
        items: Number of pairs B.
        seed: Seed for pixels and audio.
    """
    generator = torch.Generator().manual_seed(seed)
    frames, side = method.frames, method.image_size
    texts = [f"a {COLOURS[i % 4]} {SHAPES[i // 4 % 2]}{' moves' * (method.words * (i % 3) // 2)}" for i in range(items)]
    index = torch.arange(items)
    pixels = torch.randint(0, 256, (items, frames, 3, side, side), dtype=torch.uint8, generator=generator)
    mask = torch.ones(items, frames, dtype=torch.bool)
    mask[::3, -1] = False
    sound = _sound(method, items, generator)
    media = Media(pixels, mask, audio=sound, audio_mask=None if sound is None else sound.mask)
    described = [[f"{text} {verb}" for verb in ("moves", "rests", "turns", "comes", "goes", "stays")] for text in texts]
    video = VideoBatch(media, index, [f"video{i}" for i in range(items)])
    return PairBatch(TextBatch(texts, index), video, {"recover_captions": described})


def _sound(method: RetrievalModule, items: int, generator: torch.Generator) -> AudioInput | None:
    encoder = getattr(method, "audio_encoder", None)
    if encoder is None:
        return None
    shape = (items, 1, 80, 3000) if encoder.kind == "whisper" else (items, 14400)
    steps = 15 * method.frames
    edges = torch.arange(method.frames).unsqueeze(1) * 15 + torch.tensor([0, 15])
    values = 0.1 * torch.randn(shape, generator=generator)
    return AudioInput(
        values, torch.full((items,), 14400), torch.full((items,), steps), edges.expand(items, -1, -1).clone()
    )


def unconditioned(method: RetrievalModule, batch: PairBatch) -> tuple[TextFeatures, VideoFeatures]:
    """Return the features of B pairs as in a feature store: from the encoders, before the method's own layers.

    Args:
        method: Method with the encoders.
        batch: Batch of B pairs.
    """
    text = method.encoder.encode_text(batch.text.text, method.words)
    video = method.encoder.encode_video(batch.video.video, patches=method.needs_patches)
    hears = getattr(method, "audio_encoder", None)
    if hears is not None:
        audio, audio_mask = hears.encode_audio(batch.video.video)
        video = dataclasses.replace(video, audio=audio, audio_mask=audio_mask)
    return text, video


def encoded(method: RetrievalModule, text: TextFeatures, video: VideoFeatures) -> tuple[TextFeatures, VideoFeatures]:
    """Apply the method's own layers to stored features of N texts and M videos."""
    videos = VideoBatch(video, torch.arange(len(video)), [f"video{i}" for i in range(len(video))])
    return method.text_features(TextBatch(text, torch.arange(len(text)))), method.video_features(videos)


def behind_masks(
    text: TextFeatures, video: VideoFeatures, part: str, value: float
) -> tuple[TextFeatures, VideoFeatures]:
    """Fill the padded words or frames of stored features with a value."""
    if part == "words":
        return dataclasses.replace(text, words=_filled(text.words, text.word_mask, value)), video
    names = ("frames", "patches", "audio")
    found = {name: getattr(video, name) for name in names if getattr(video, name) is not None}
    filled = {name: _filled(tensor, video.frame_mask, value) for name, tensor in found.items()}
    return text, dataclasses.replace(video, **filled)


def padded(text: TextFeatures, video: VideoFeatures, part: str, by: int = 2) -> tuple[TextFeatures, VideoFeatures]:
    """Pad N texts or M videos to more words or frames."""

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(len(tensor), by, *tensor.shape[2:])], 1)

    if part == "words":
        return TextFeatures(text.sentence, longer(text.words), longer(text.word_mask)), video
    return text, video.apply(longer)


def _filled(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
    return tensor.masked_fill(~mask.reshape(*mask.shape, *[1] * (tensor.ndim - mask.ndim)), value)
