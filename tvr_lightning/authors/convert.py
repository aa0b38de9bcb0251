"""`tvr convert`: an authors' checkpoint becomes one that `tvr test --ckpt_path` and `load_from_checkpoint` load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from tvr_lightning.authors.checkpoint import AuthorsCheckpointError, read_checkpoint
from tvr_lightning.authors.clip import clip_sizes, encoder_configuration
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
from tvr_lightning.checkpoints import CONVERTED
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.places import File, NewFile
from tvr_lightning.progress import shown
from tvr_lightning.ranges import Count

IMPORT: Mapping[str, Callable[[Mapping[str, Tensor], str, int, int], RetrievalModule]] = {
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
"""By the method's name on the command line: (checkpoint, source, words, frames) to the method with its weights."""

ORIGIN = CONVERTED
"""Entry of a converted file: method, words, frames, and the sizes of the CLIP that the authors' checkpoint held."""


@dataclass(frozen=True)
class Converted:
    """What a conversion made.

    Attributes:
        module: the method with the checkpoint's weights, on the CPU, in evaluation mode.
        encoder: what a recipe writes below `encoder:` for it; None where recipes know no architecture of its sizes.
        path: the file that was written.
    """

    module: RetrievalModule
    encoder: dict[str, Any] | None
    path: Path

    def test_options(self) -> list[str]:
        """Options that make `tvr test` build the method that the file is for, besides recipe and data."""
        options = [f"--ckpt_path {self.path}"]
        if self.encoder is not None:
            options += [
                f"--model.init_args.encoder.init_args.{key}={value}" for key, value in self.encoder["init_args"].items()
            ]
        return options


def convert(method: str, source: Path, out: Path, words: int = 32, frames: int = 12) -> Converted:
    """Turn an authors' checkpoint into a Lightning checkpoint.

    The file holds plain tensors, strings and numbers, so that it loads with `weights_only=True`.

    Args:
        method: whose names the checkpoint has, such as `clip4clip` or `tcmgc`.
        source: the authors' file (`pytorch_model.bin.*`, `.pth`, `.pt`, `.safetensors`).
        out: the file to write.
        words: text positions W that the method is for.
        frames: frames F that the method is for.

    Raises:
        AuthorsCheckpointError: no importer for the method, no readable file, another method's checkpoint, names or
            sizes that do not fit.
    """
    build = IMPORT.get(method)
    if build is None:
        raise AuthorsCheckpointError(f"no importer for the method {method!r}; known: {', '.join(sorted(IMPORT))}")
    checkpoint = with_openai_names(read_checkpoint(source), str(source))
    module = build(checkpoint, str(source), words, frames)
    encoder = encoder_configuration(checkpoint) if "clip.visual.proj" in checkpoint else None
    arguments: dict[str, Any] = {name: value for name, value in module.hparams.items() if value is not None}
    if encoder is not None:
        # As LightningCLI stores a recipe's model: `load_from_checkpoint` then builds the encoder too.
        arguments |= {"encoder": encoder, "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    content = {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "state_dict": {name: tensor.detach().clone() for name, tensor in module.state_dict().items()},
        "hyper_parameters": {
            **arguments,
            "_class_path": f"{type(module).__module__}.{type(module).__qualname__}",
        },
        ORIGIN: {"method": method, "words": words, "frames": frames, "clip": clip_sizes(checkpoint)},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, out)
    return Converted(module, encoder, out)


def run_convert(method: str, source: File, out: NewFile, words: Count = 32, frames: Count = 12) -> int:
    """Turn an authors' checkpoint into one that `tvr test --ckpt_path` loads.

    Args:
        method: whose parameter names the checkpoint has: clip4clip, tcmgc, ...
        source: the authors' file (pytorch_model.bin.*, .pth, .pt or .safetensors).
        out: the file to write.
        words: text positions the checkpoint was trained with, SOT and EOT included.
        frames: frames per video the checkpoint was trained with.
    """
    with shown(f"convert: reading {source.name}"):
        made = convert(method, source, out, words=words, frames=frames)
    count = sum(parameter.numel() for parameter in made.module.parameters())
    print(f"Wrote {out}: {type(made.module).__name__}, {count / 1e6:.2f} M parameters")
    settings = {"words": words, "frames": frames, **_unusual(made.module)}
    print(f"The recipe must say: {', '.join(f'{key}: {value}' for key, value in sorted(settings.items()))}")
    if made.encoder is None:
        print(
            "Its CLIP has the sizes of no architecture that recipes know; in Python, load_from_checkpoint takes it with"
        )
        print("an encoder of these sizes, such as ClipEncoder.from_openai_state_dict builds.")
    else:
        print(f"  tvr test --config recipes/{method}.yaml {' '.join(made.test_options())}")
    return 0


def _unusual(module: RetrievalModule) -> dict[str, Any]:
    """Options of a method's paper that are not the defaults."""
    options = vars(module.options)
    usual = vars(type(module.options)())
    return {f"{type(module).__name__.lower()}.{name}": value for name, value in options.items() if value != usual[name]}
