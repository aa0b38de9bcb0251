"""The CLIP encoder of the papers: any open_clip architecture, with weights from a file, a tag, or none."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from torch import Tensor, nn

from tvr_lightning.encoders.base import EncoderPrecision, FreezeRule
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.pretrained import WeightSource, do_weights_follow, find_weights, model_configuration
from tvr_lightning.encoders.weights import CONSTANTS, StateDict, load_weights, read_state_dict

logger = logging.getLogger(__name__)


class ClipEncoder(OpenClipEncoder):
    """CLIP by open_clip's name of the architecture (Radford et al. 2021; CLIP4Clip, modules/module_clip.py).

    The activation follows the weights: a tag as open_clip records it, OpenAI's own files QuickGELU, any other file and
    random weights as the name says (`-quickgelu` or not). A tag trained with GELU under a `-quickgelu` name is an
    error.

    Args:
        architecture: such as `ViT-B-32`, `ViT-B-16` or `ViT-L-14`.
        weights: an open_clip tag such as `openai` (taken from open_clip's cache or downloaded), a local file (OpenAI
            archive or state dict; open_clip .pt, .bin or .safetensors), or null for random weights.
        text_mask: mask padding in the text transformer (GARE, HBI).
        encoder_precision: `fp16-master` keeps matrices in half precision as the released codes do.
        gradient_checkpointing: trade time for memory.
        freeze: which parameters stay as they are.
        compile_towers: compile the transformers' blocks with torch.compile; the first steps then take longer.

    Raises:
        MissingWeightsError: the weights are neither here nor downloadable.
        ValueError: unknown architecture or tag, QuickGELU mismatch, weights that do not fit.
    """

    def __init__(
        self,
        architecture: str = "ViT-B-32",
        weights: str | None = "openai",
        text_mask: bool = False,
        encoder_precision: EncoderPrecision = "fp32",
        gradient_checkpointing: bool = False,
        freeze: FreezeRule = "none",
        compile_towers: bool = False,
    ):
        source = find_weights(architecture, weights)
        state = None if source.path is None else read_state_dict(source.path)
        configuration = model_configuration(architecture)
        configuration["quick_gelu"] = _quick_gelu(configuration, source.quick_gelu, state)
        clean = configuration["text_cfg"].get("tokenizer_kwargs", {}).get("clean", "lower")
        model = build_model(configuration, encoder_precision)
        if state is None and not do_weights_follow():
            logger.warning("%s starts from RANDOM weights (weights: none): it knows nothing yet", architecture)
        elif state is not None:
            load_weights(model, state.tensors, f"{source.path} ({architecture})")
            _report_activation(architecture, source, configuration["quick_gelu"])
        super().__init__(
            model,
            architecture,
            source.mean,
            source.std,
            clean=clean,
            text_mask=text_mask,
            encoder_precision=encoder_precision,
            gradient_checkpointing=gradient_checkpointing,
            freeze=freeze,
            compile_towers=compile_towers,
        )

    @classmethod
    def required_files(
        cls, *, architecture: str = "ViT-B-32", weights: str | None = "openai", **options: Any
    ) -> list[Path]:
        """Return the file of the weights, downloaded where a tag names it; see `Encoder.required_files`."""
        path = find_weights(architecture, weights).path
        return [] if path is None else [path]

    @staticmethod
    def from_openai_state_dict(
        state_dict: dict[str, Tensor],
        text_mask: bool = False,
        encoder_precision: EncoderPrecision = "fp32",
        gradient_checkpointing: bool = False,
        freeze: FreezeRule = "none",
    ) -> OpenClipEncoder:
        """Build the vision-transformer CLIP that a state dict under OpenAI's names describes, of any size.

        Depths and widths come from the shapes, heads are width // 64, the activation is QuickGELU (OpenAI CLIP,
        clip/model.py, `build_model`).

        Args:
            state_dict: tensors under OpenAI's names, without any prefix.
            text_mask: as for the class.
            encoder_precision: as for the class.
            gradient_checkpointing: as for the class.
            freeze: as for the class.

        Raises:
            ValueError: the names or shapes are not those of such a CLIP.
        """
        tensors = {name: tensor for name, tensor in state_dict.items() if name not in CONSTANTS}
        model = build_model(_openai_configuration(tensors), encoder_precision)
        load_weights(model, tensors, "the state dict")
        return OpenClipEncoder(
            model,
            "openai-state-dict",
            OPENAI_DATASET_MEAN,
            OPENAI_DATASET_STD,
            text_mask=text_mask,
            encoder_precision=encoder_precision,
            gradient_checkpointing=gradient_checkpointing,
            freeze=freeze,
        )


def build_model(configuration: dict[str, Any], encoder_precision: EncoderPrecision) -> nn.Module:
    """Build a randomly initialised open_clip model from open_clip's configuration.

    Args:
        configuration: `embed_dim`, `vision_cfg`, `text_cfg` and switches, as in open_clip's JSON files.
        encoder_precision: `fp16-master` chooses LayerNorms that compute half-precision input in float32.
    """
    configuration = dict(configuration)
    custom = configuration.pop("custom_text", False)
    vision = dict(configuration.pop("vision_cfg"))
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False  # the CLIP weights replace them; no download on the way
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    cast_dtype = torch.float16 if encoder_precision == "fp16-master" else None
    return kind(vision_cfg=vision, cast_dtype=cast_dtype, **configuration)


def _quick_gelu(configuration: dict[str, Any], tag: bool | None, state: StateDict | None) -> bool:
    if tag is not None:
        return tag
    return bool(configuration.get("quick_gelu", False)) or (state is not None and state.openai)


def _report_activation(architecture: str, source: WeightSource, quick_gelu: bool) -> None:
    if quick_gelu or source.quick_gelu is not None or f"{architecture}-quickgelu" not in open_clip.list_models():
        logger.info("%s with %s: weights from %s", architecture, "QuickGELU" if quick_gelu else "GELU", source.path)
        return
    logger.warning(
        "%s does not say with which activation it was trained; taking GELU as the name %s says. If it was QuickGELU "
        "(all of OpenAI's weights), use the architecture %s-quickgelu",
        source.path,
        architecture,
        architecture,
    )


def _openai_configuration(tensors: dict[str, Tensor]) -> dict[str, Any]:
    def blocks(prefix: str) -> int:
        return len({name[len(prefix) :].split(".")[0] for name in tensors if name.startswith(prefix)})

    try:
        vision_width, _, patch_size, _ = tensors["visual.conv1.weight"].shape
        side = math.isqrt(tensors["visual.positional_embedding"].shape[0] - 1)
        context_length, width = tensors["positional_embedding"].shape
        vocabulary = tensors["token_embedding.weight"].shape[0]
        dimension = tensors["text_projection"].shape[1]
    except (KeyError, ValueError) as error:
        raise ValueError(f"not an OpenAI CLIP state dict with a vision transformer: {error}") from error
    return {
        "embed_dim": dimension,
        "quick_gelu": True,
        "vision_cfg": {
            "width": vision_width,
            "head_width": min(64, vision_width),
            "layers": blocks("visual.transformer.resblocks."),
            "patch_size": patch_size,
            "image_size": side * patch_size,
        },
        "text_cfg": {
            "context_length": context_length,
            "vocab_size": vocabulary,
            "width": width,
            "heads": max(1, width // 64),
            "layers": blocks("transformer.resblocks."),
        },
    }
