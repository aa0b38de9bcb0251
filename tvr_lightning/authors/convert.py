"""`tvr convert`: conversion of an authors' checkpoint for `tvr test --ckpt_path` and `tvr_lightning.load`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from tvr_lightning import __version__, encoders
from tvr_lightning.authors.families import Family
from tvr_lightning.authors.importer import clip_configuration, family_of, fixed_sizes, import_checkpoint
from tvr_lightning.authors.names import with_openai_names
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.encoders.weights import read_tensors
from tvr_lightning.errors import UserError
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.gaid.method import AUDIO, GAID
from tvr_lightning.methods.ucofia import UCoFiA
from tvr_lightning.training.checkpoints import CONVERTED, RECORD, check_target, write_checkpoint

RECIPE_ARCHITECTURES = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336")
RELEASED_AUDIO: Mapping[int, dict[str, Any]] = {
    512: {"class_path": "WhisperEncoder", "init_args": {"size": "base", "weights": "openai"}},
    768: {"class_path": "Wav2Vec2Encoder", "init_args": {"size": "base", "weights": "facebook"}},
}
"""`audio_encoder:` sections of a recipe by the width of the features."""


def released_recipe(family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data and model options of a method's released evaluation on MSR-VTT.

    A converted file records them, so options for reading videos and captions as in the released code belong in these
    recipes.
    """
    recipes = [read_recipe(family.name)]
    if family.leaks:
        recipes.append(read_recipe(f"variants/{family.name}-as-released"))
    data: dict[str, Any] = {"_class_path": f"tvr_lightning.data.{recipes[0]['data']['class_path']}"}
    model: dict[str, Any] = {}
    for recipe in recipes:
        data |= (recipe.get("data") or {}).get("init_args") or {}
        model |= recipe["model"]["init_args"]
    return data, model


def encoder_section(configuration: dict[str, Any], switches: dict[str, bool]) -> dict[str, Any]:
    """Return the `encoder:` section of a recipe for a CLIP with this configuration.

    OpenAI's architectures have the same name as in recipes, with the weights that the authors started from. Other
    sizes are written explicitly.
    """
    for name in RECIPE_ARCHITECTURES:
        known = model_configuration(name)
        towers = (known[tower].items() <= configuration[tower].items() for tower in ("vision_cfg", "text_cfg"))
        if known["embed_dim"] == configuration["embed_dim"] and all(towers):
            return {"class_path": "ClipEncoder", "init_args": {"architecture": name, "weights": "openai", **switches}}
    return {"class_path": "SizedClipEncoder", "init_args": {"configuration": configuration, **switches}}


def model_options(module: RetrievalModule, checkpoint: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the options that build a method imported from a checkpoint, as in a recipe."""
    encoder: Any = module.encoder
    switches = {"text_mask": encoder.text_mask, "patch_shift": encoder.patch_shift is not None}
    options = {name: value for name, value in module.hparams.items() if value is not None}
    options["encoder"] = encoder_section(clip_configuration(checkpoint), switches)
    options["_class_path"] = f"{type(module).__module__}.{type(module).__qualname__}"
    if isinstance(module, GAID) and module.audio_encoder is not None:
        width = module.audio_encoder.dimension
        random = {"class_path": "TinyWhisperEncoder", "init_args": {"width": width, "seed": 0}}
        options["audio_encoder"] = RELEASED_AUDIO.get(width, random)
    return options


def convert(
    source: Path,
    out: Path,
    words: int | None = None,
    frames: int | None = None,
    method: str | None = None,
    openai_clip: Path | None = None,
) -> tuple[RetrievalModule, list[str]]:
    """Convert an authors' checkpoint to a Lightning checkpoint, and return the method and lines that describe it.

    The file also records the released evaluation. It contains only plain tensors, strings and numbers, so that it loads
    with `weights_only=True`. Float16 tensors become float32, the precision of the evaluation. Arguments are those of
    `tvr convert`.

    Raises:
        UserError: `out` is one of the files read, the file is unreadable or belongs to another method, its names or
            sizes do not fit, or `openai_clip` is given for another method than UCoFiA.
    """
    check_target(out, source, openai_clip)
    checkpoint = with_openai_names(read_tensors(source), str(source))
    family = family_of(checkpoint, str(source), method)
    data, recipe = released_recipe(family)
    positions = len(checkpoint.get("clip.positional_embedding", range(data["words"])))
    sizes = {"words": min(data["words"], positions), "frames": data["frames"]} | fixed_sizes(checkpoint)
    openai = None if openai_clip is None else read_tensors(openai_clip)
    words, frames = words or sizes["words"], frames or sizes["frames"]
    module = import_checkpoint(checkpoint, str(source), words, frames, openai=openai)
    model = model_options(module, checkpoint)
    model |= {name: recipe[name] for name in ("protocol",) if name in recipe}
    data |= {"words": module.words, "frames": module.frames}
    if model.get("audio_encoder") == RELEASED_AUDIO[768]:
        data |= read_recipe("backbone/wav2vec2-base")["data"]["init_args"]
    content = {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "state_dict": {
            name: tensor.detach().clone()
            for name, tensor in module.state_dict().items()
            if not name.startswith(AUDIO)  # excludes the placeholder encoder
        },
        "hyper_parameters": model,
        "datamodule_hyper_parameters": data,
        RECORD: {"version": __version__},
        CONVERTED: {"method": family.name},
    }
    write_checkpoint(content, out)
    halves = sum(tensor.dtype == torch.float16 for tensor in checkpoint.values())
    return module, _description(out, module, model, data, halves)


def _description(
    out: Path, module: RetrievalModule, model: dict[str, Any], data: dict[str, Any], halves: int
) -> list[str]:
    """Return lines about a conversion: the options that differ from the defaults, and how to test it."""
    name = type(module).__name__
    count = sum(parameter.numel() for key, parameter in module.named_parameters() if not key.startswith(AUDIO))
    lines = [f"Wrote {out}: {name}, {count / 1e6:.2f} M parameters"]
    defaults = vars(type(module.options)())
    unusual = {f"{name.lower()}.{key}": value for key, value in vars(module.options).items() if value != defaults[key]}
    for title, settings in {"Options": unusual, "Data": data}.items():
        listed = ", ".join(f"{key}: {value}" for key, value in sorted(settings.items()) if key != "_class_path")
        lines += [f"{title}: {listed}"] if listed else []
    if halves:
        lines.append(f"{halves} float16 tensors are now float32, in which the method is evaluated.")
    if "audio_encoder" in model:
        audio = model["audio_encoder"]["class_path"]
        weights = f"{audio} loads its own weights when the method is tested."
        try:
            getattr(encoders, audio).required_files(**model["audio_encoder"]["init_args"])
        except UserError as error:
            weights = f"The test needs its weights too. {error}"
        if audio == "TinyWhisperEncoder":
            weights = "No released audio encoder has its feature width, so a random TinyWhisperEncoder is used."
        lines.append(f"The checkpoint does not contain an audio encoder. {weights}")
    if model.get("protocol") == "as-released":
        lines.append(
            'Its results are marked "leaks ground truth", because the released evaluation leaks it. For a protocol\n'
            "without leakage, add --model.init_args.protocol=query."
        )
    if isinstance(module, UCoFiA):
        lines.append(
            "Published results normalize scores with all training queries: for them, add\n"
            "--config recipes/variants/ucofia-released-eval.yaml."
        )
    return [*lines, f"Test it with: tvr test --ckpt_path {out}"]
