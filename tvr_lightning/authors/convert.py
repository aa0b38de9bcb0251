"""`tvr convert`: conversion of an authors' checkpoint for `tvr test --ckpt_path` and `tvr_lightning.load`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from tvr_lightning.authors.checkpoint import family_of, read_checkpoint
from tvr_lightning.authors.clip import encoder_configuration
from tvr_lightning.authors.clip4clip import import_clip4clip
from tvr_lightning.authors.drl import import_drl
from tvr_lightning.authors.gaid import import_gaid
from tvr_lightning.authors.gare import import_gare
from tvr_lightning.authors.huggingface import with_openai_names
from tvr_lightning.authors.tcmgc import import_tcmgc
from tvr_lightning.authors.tmass import import_tmass
from tvr_lightning.authors.ucofia import import_ucofia
from tvr_lightning.authors.xclip import import_xclip
from tvr_lightning.authors.xpool import import_xpool
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.weights import read_state_dict
from tvr_lightning.errors import UserError
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.gaid import GAID
from tvr_lightning.methods.gaid.method import AUDIO
from tvr_lightning.training.checkpoints import CONVERTED

IMPORT: Mapping[str, Callable[..., RetrievalModule]] = {
    "clip4clip": import_clip4clip,
    "drl": import_drl,
    "gaid": import_gaid,
    "gare": import_gare,
    "tcmgc": import_tcmgc,
    "tmass": import_tmass,
    "ucofia": import_ucofia,
    "xclip": import_xclip,
    "xpool": import_xpool,
}
"""Importers by the method's command-line name: (checkpoint, source, words, frames) to the method with its weights."""

RELEASED: Mapping[str, tuple[str, ...]] = {
    "clip4clip": ("clip4clip",),
    "drl": ("drl",),
    "gaid": ("gaid", "variants/gaid-as-released"),
    "gare": ("gare",),
    "tcmgc": ("tcmgc",),
    "tmass": ("tmass", "variants/tmass-as-released"),
    "ucofia": ("ucofia",),
    "xclip": ("xclip",),
    "xpool": ("xpool",),
}
"""Recipes of each method's released evaluation on MSR-VTT; later ones override earlier ones.

A converted file records the `data` section of these recipes and their protocol, so options for reading videos and
captions as in the released code belong there.
"""


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        module: Method with the checkpoint's weights, on the CPU, in evaluation mode.
        data: Data options of the released evaluation.
        protocol: Protocol of the released evaluation.
        halves: Number of float16 tensors that were converted to float32.
        path: Written file.
    """

    module: RetrievalModule
    data: dict[str, Any]
    protocol: str
    halves: int
    path: Path


def released_evaluation(method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data and model options of a method's released evaluation on MSR-VTT."""
    sections = [read_recipe(name) for name in RELEASED[method]]
    data: dict[str, Any] = {"_class_path": f"tvr_lightning.data.{sections[0]['data']['class_path']}"}
    model: dict[str, Any] = {}
    for section in sections:
        data |= (section.get("data") or {}).get("init_args") or {}
        model |= section["model"]["init_args"]
    return data, {name: model[name] for name in ("protocol",) if name in model}


def sizes(checkpoint: Mapping[str, Tensor], data: Mapping[str, Any]) -> tuple[int, int]:
    """Return the words W and frames F that a checkpoint's matrices determine, or else those of the data.

    Without word matrices, W is at most the number of positions of the text transformer, and captions are truncated.
    """
    matrices = {name: len(checkpoint[name]) for name in ("word_mat_weight", "frame_logit_weight") if name in checkpoint}
    radius = checkpoint.get("stochastic.std_branch.linear_proj.weight")
    positions = checkpoint.get("clip.positional_embedding")
    words = data["words"] if positions is None else min(data["words"], len(positions))
    frames = data["frames"] if radius is None else radius.shape[1]
    return matrices.get("word_mat_weight", words), matrices.get("frame_logit_weight", frames)


def convert(
    source: Path,
    out: Path,
    words: int | None = None,
    frames: int | None = None,
    method: str | None = None,
    openai_clip: Path | None = None,
) -> Converted:
    """Convert an authors' checkpoint to a Lightning checkpoint with the method and its released evaluation.

    The file contains only plain tensors, strings and numbers, so that it loads with `weights_only=True`. Float16
    tensors become float32, the precision of the evaluation.

    Args:
        source: Authors' file (`pytorch_model.bin.*`, `.pth`, `.pt`, `.safetensors`).
        out: Output file.
        words: Text positions W. By default those of the checkpoint's matrices, or of the method's released evaluation.
        frames: Number of frames F, with the same default.
        method: Method that the checkpoint must belong to. By default, it is detected from the tensors.
        openai_clip: OpenAI's weights, to evaluate UCoFiA as in its released evaluation (`import_ucofia`).

    Raises:
        UserError: The file is unreadable or belongs to another method, its names or sizes do not fit, or
            `openai_clip` is given for another method than UCoFiA.
    """
    if method is not None and method not in IMPORT:
        raise UserError(f"The method {method!r} is not supported. Available: {', '.join(sorted(IMPORT))}")
    checkpoint = with_openai_names(read_checkpoint(source), str(source))
    method = method or family_of(checkpoint, str(source)).method
    data, protocol = released_evaluation(method)
    found_words, found_frames = sizes(checkpoint, data)
    arguments: list[Any] = [checkpoint, str(source), words or found_words, frames or found_frames]
    if openai_clip is not None:
        if method != "ucofia":
            raise UserError(f"{source}: --openai_clip is only for UCoFiA. Omit it for {method}.")
        arguments.append(read_state_dict(openai_clip).tensors)
    module = IMPORT[method](*arguments)
    data |= {"words": module.words, "frames": module.frames}
    if isinstance(module, GAID) and module.hparams["audio_encoder"]["class_path"] == "Wav2Vec2Encoder":
        data |= read_recipe("backbone/wav2vec2-base")["data"]["init_args"]
    assert isinstance(module.encoder, OpenClipEncoder)
    content = {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "state_dict": {
            name: tensor.detach().clone()
            for name, tensor in module.state_dict().items()
            if not name.startswith(AUDIO)  # excludes the placeholder encoder
        },
        "hyper_parameters": {
            **{name: value for name, value in module.hparams.items() if value is not None},
            **protocol,
            "encoder": encoder_configuration(checkpoint, module.encoder),
            "_class_path": f"{type(module).__module__}.{type(module).__qualname__}",
        },
        "datamodule_hyper_parameters": data,
        CONVERTED: {"method": method},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, out)
    halves = sum(tensor.dtype == torch.float16 for tensor in checkpoint.values())
    return Converted(module, data, protocol.get("protocol", "query"), halves, out)


def describe(made: Converted) -> list[str]:
    """Return lines about a conversion: the options that differ from the defaults, and how to test it."""
    module = made.module
    count = sum(parameter.numel() for name, parameter in module.named_parameters() if not name.startswith(AUDIO))
    lines = [f"Wrote {made.path}: {type(module).__name__}, {count / 1e6:.2f} M parameters"]
    for name, settings in {"Options": _unusual(module), "Data": made.data}.items():
        listed = ", ".join(f"{key}: {value}" for key, value in sorted(settings.items()) if key != "_class_path")
        lines += [f"{name}: {listed}"] if listed else []
    if made.halves:
        lines.append(f"{made.halves} float16 tensors are now float32, in which the method is evaluated.")
    if isinstance(module, GAID):
        audio = module.hparams["audio_encoder"]["class_path"]
        weights = (
            "No released audio encoder has its feature width, so a random TinyWhisperEncoder is used."
            if audio == "TinyWhisperEncoder"
            else f"{audio} loads its own weights when the method is tested."
        )
        lines.append(f"The checkpoint does not contain an audio encoder. {weights}")
    if made.protocol == "as-released":
        lines.append(
            'Its results are marked "leaks ground truth", because the released evaluation leaks it. For a protocol\n'
            "without leakage, add --model.init_args.protocol=query."
        )
    return [*lines, f"Test it with: tvr test --ckpt_path {made.path}"]


def _unusual(module: RetrievalModule) -> dict[str, Any]:
    """Return the options of a method's paper that differ from the defaults."""
    options = vars(module.options)
    usual = vars(type(module.options)())
    return {f"{type(module).__name__.lower()}.{name}": value for name, value in options.items() if value != usual[name]}
