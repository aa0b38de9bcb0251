"""Small methods for tests, built from their recipes, with random pairs and synthetic data."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import PairBatch, TextBatch
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.reproduce.profile.costs import random_batch
from tvr_lightning.synthetic import synthesize
from tvr_lightning.training.checkpoints import find_class

WORDS, FRAMES, BATCH = 12, 4, 8
COLORS, SHAPES = ("red", "green", "blue", "white"), ("ball", "box")
DATA = {"frames": FRAMES, "words": WORDS, "batch_size": BATCH, "eval_batch_size": 5, "num_workers": 0}


def method_recipes(folder: Path) -> dict[str, Path]:
    """Return one recipe per retrieval method and contrast in a folder, by title: the method's own or the shortest."""
    recipes: dict[str, Path] = {}
    for path in sorted(folder.glob("*.yaml"), key=lambda path: (len(path.stem), path.stem)):
        model = read_recipe(path).get("model") or {}
        method = find_class(path, str(model["class_path"])) if "class_path" in model else object
        if issubclass(method, RetrievalModule):
            contrast = (model.get("init_args") or {}).get("contrast")
            title = f"{contrast['class_path']} on {method.__name__}" if contrast else method.__name__
            if path.stem == title.lower():
                recipes[title] = path
            recipes.setdefault(title, path)
    return dict(sorted(recipes.items()))


@functools.cache
def synthetic_data() -> str:
    """Write a synthetic MSR-VTT of a few videos, once per process; it is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="tvr-methods-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    synthesize("msrvtt", Path(folder), 16, 0, workers=1, progress=False)
    return folder


def small_encoder(recipe: Path) -> dict[str, Any]:
    """Return the section of the small version of a recipe's encoder (`Encoder.small`)."""
    encoder = read_recipe(recipe)["model"]["init_args"]["encoder"]
    kind: Any = find_class(recipe, encoder["class_path"])
    section: dict[str, Any] = kind.small(**encoder.get("init_args", {}))
    return section


def small(recipe: Path, *overrides: str, root: str | None = None) -> tuple[RetrievalModule, TextVideoDataModule]:
    """Build a recipe's method, with a small encoder and seeded random weights, and its data.

    Overrides are options as on the command line, such as `--model.init_args.gather=local`. `root` is the parent folder
    of an MSR-VTT; by default, a synthetic one is written once per process.
    """
    torch.manual_seed(0)
    built = _parsed(recipe, overrides, root or synthetic_data()).build()
    return built.model, built.data


@functools.cache
def _parsed(recipe: Path, overrides: tuple[str, ...], root: str) -> Recipe:
    overlay = {
        "model": {"init_args": {"encoder": small_encoder(recipe)}},
        "data": {"class_path": "MSRVTT", "init_args": {"root": root, **DATA, "augmentation": "none"}},
    }
    parsed = Recipe.parse([recipe, json.dumps(overlay)], overrides)
    parsed.check()
    return parsed


def random_pairs(method: RetrievalModule, items: int, seed: int = 0) -> PairBatch:
    """Return pairs of captions and random clips of the method's sizes, with audio and descriptions.

    Every third clip is missing its last frame; captions are short, long, and longer than the method's maximum.
    """
    batch = random_batch(method, items, seed, samples=14400, steps=15 * method.frames)
    batch.video.video.frame_mask[::3, -1] = False
    texts = [f"a {COLORS[i % 4]} {SHAPES[i // 4 % 2]}{' moves' * (method.words * (i % 3) // 2)}" for i in range(items)]
    described = [[f"{text} {verb}" for verb in ("moves", "rests", "turns", "comes", "goes", "stays")] for text in texts]
    return PairBatch(TextBatch(texts, batch.text.index), batch.video, {"recover_captions": described})


def unconditioned(method: RetrievalModule, batch: PairBatch) -> tuple[TextFeatures, VideoFeatures]:
    """Return the features of B pairs as in a feature store: from the encoders, before the method's own layers."""
    text = method.encoder.encode_text(batch.text.text, method.words)
    video = method.encoder.encode_video(batch.video.video, patches=method.needs_patches)
    if (audio_encoder := getattr(method, "audio_encoder", None)) is not None:
        video.audio, video.audio_mask = audio_encoder.encode_audio(batch.video.video)
    return text, video
