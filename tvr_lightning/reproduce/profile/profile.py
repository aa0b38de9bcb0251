"""Cost of a recipe's method, measured on random inputs."""

from __future__ import annotations

import re

import torch
from lightning.pytorch import Trainer

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import RecipeError
from tvr_lightning.data.batch import AudioInput, Media, PairBatch, TextBatch, VideoBatch
from tvr_lightning.encoders.pretrained import weights_follow
from tvr_lightning.evaluation.results import environment
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.progress import shown
from tvr_lightning.reproduce.profile.costs import ProfileCard, count_flops, measure_costs, profile_table

WORDS = "a person walks along the street while a small dog runs beside a red car"
AUDIO_STEPS, AUDIO_SAMPLES = 1500, 480_000  # of 30 s: vectors of 20 ms, and samples at 16 kHz


def profile(recipe: Recipe, batch_size: int, queries: int, repeats: int, device: str | None) -> ProfileCard:
    """Measure a recipe's method with random weights on random inputs of its sizes, and print the costs."""
    recipe.check_trainer()
    model = recipe.config.model
    for option in list(model.keys()):
        if re.fullmatch(r"init_args\.(\w+\.init_args\.)*weights", option):  # of the encoders, not in a method's options
            model[option] = None
    with weights_follow():  # for encoders that a recipe leaves to its method
        built = recipe.build()
    module = built.model
    if not isinstance(module, RetrievalModule):
        raise RecipeError(f"tvr profile measures retrieval methods, not {type(module).__name__}")
    settings = {name: getattr(built.trainer, name) for name in ("precision", "plugins")}
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, **settings)
    plugin = trainer.precision_plugin
    plugin.convert_module(module.to(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    with shown("profile: measuring"):
        batch = random_batch(module, batch_size)
        costs = measure_costs(module, batch, queries, batch_size, repeats, plugin.forward_context)
        costs.flops_by_stage = count_flops(module, batch)
    encoder = " ".join(filter(None, (type(module.encoder).__name__, getattr(module.encoder, "name", None))))
    card = ProfileCard(
        name=re.sub(r"[^a-z0-9]+", "-", f"{module.title} {encoder}".lower()).strip("-"),
        method=module.title,
        encoder=encoder,
        options=recipe.plain()["model"],
        batch=batch_size,
        queries=queries,
        repeats=repeats,
        precision=str(trainer.precision),
        costs=costs,
        environment={**environment(), "device": str(module.device)},
    )
    print(profile_table([card]).T.to_string())
    for name, count in costs.parameters_by_module.items():
        print(f"parameters of {name}: {count / 1e6:.3f} M")
    return card


def random_batch(module: RetrievalModule, count: int) -> PairBatch:
    """Return matching pairs of a fixed caption and random media with audio, in the method's sizes."""
    generator = torch.Generator().manual_seed(0)
    frames, size = module.frames, module.image_size
    pixels = torch.randint(0, 256, (count, frames, 3, size, size), dtype=torch.uint8, generator=generator)
    audio, encoder = None, getattr(module, "audio_encoder", None)
    if encoder is not None:
        shape = (count, 1, 80, 3000) if encoder.kind == "whisper" else (count, AUDIO_SAMPLES)
        borders = torch.linspace(0, AUDIO_STEPS, frames + 1).long()
        windows = torch.stack([borders[:-1], borders[1:]], dim=1).expand(count, -1, -1).contiguous()
        samples, steps = torch.full((count,), AUDIO_SAMPLES), torch.full((count,), AUDIO_STEPS)
        audio = AudioInput(torch.randn(shape, generator=generator), samples, steps, windows)
    index = torch.arange(count)
    media = Media(pixels, torch.ones(count, frames, dtype=torch.bool), audio, None if audio is None else audio.mask)
    extras = {"recover_captions": [[WORDS] * 6 for _ in range(count)]}  # of methods that train on them
    videos = VideoBatch(media, index, [f"video{place}" for place in range(count)])
    return PairBatch(TextBatch([WORDS] * count, index), videos, extras).to(module.device)
