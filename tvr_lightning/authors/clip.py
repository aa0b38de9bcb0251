"""CLIP and the temporal encoder of an authors' checkpoint, which most released codes take from CLIP4Clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tvr_lightning.encoders.clip import openai_configuration, openai_sizes
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf, SimilarityHeader
from tvr_lightning.methods.clip4clip import TightTransf

RECIPE_ARCHITECTURES = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336")


def clip_sizes(checkpoint: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes of the CLIP in a checkpoint, as arguments of `SizedClipEncoder`.

    Raises:
        UserError: The `clip.*` tensors do not belong to an OpenAI CLIP with a vision transformer.
    """
    return openai_sizes({name.removeprefix("clip."): t for name, t in checkpoint.items() if name.startswith("clip.")})


def similarity_header(checkpoint: Mapping[str, Tensor]) -> SimilarityHeader:
    """Return the temporal encoder of a checkpoint, with its number of layers."""

    def blocks(prefix: str) -> int:
        return len({name.removeprefix(prefix).split(".")[0] for name in checkpoint if name.startswith(prefix)})

    if tight := blocks("cross.transformer.resblocks."):
        return TightTransf(tight)
    if sequential := blocks("transformerClip.resblocks."):
        return SeqTransf(sequential)
    if layers := blocks("lstm_visual.weight_ih_l"):
        return SeqLSTM(layers)
    return MeanP()


def encoder_section(sizes: dict[str, int], switches: dict[str, bool]) -> dict[str, Any]:
    """Return the `encoder:` section of a recipe for a CLIP of these sizes.

    OpenAI's architectures have the same name as in recipes, with the weights that the authors started from. Other
    sizes are written explicitly.
    """
    found = openai_configuration(**sizes)
    for name in RECIPE_ARCHITECTURES:
        known = model_configuration(name)
        towers = (known[tower].items() <= found[tower].items() for tower in ("vision_cfg", "text_cfg"))
        if known["embed_dim"] == found["embed_dim"] and all(towers):
            return {"class_path": "ClipEncoder", "init_args": {"architecture": name, "weights": "openai", **switches}}
    return {"class_path": "SizedClipEncoder", "init_args": {**sizes, **switches}}
