"""CLIP encoder of the papers: any open_clip architecture, with weights from a file, a tag, or none."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import open_clip
import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.encoders.base import EncoderPrecision
from tvr_lightning.encoders.hub import how_to_download, repository_folder
from tvr_lightning.encoders.open_clip_encoder import NO_FLOAT16, OpenClipEncoder
from tvr_lightning.encoders.pretrained import do_weights_follow, find_weights, local_folder, model_configuration
from tvr_lightning.encoders.text_towers import lengthen
from tvr_lightning.encoders.tokenizer import TOKENIZER_FILES, VOCABULARIES, build_tokenizer
from tvr_lightning.encoders.weights import load_weights, read_state_dict
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Role, WeightFile

logger = logging.getLogger(__name__)


class ClipEncoder(OpenClipEncoder):
    """CLIP with any open_clip architecture (Radford et al. 2021; CLIP4Clip, modules/module_clip.py).

    The weights determine the activation: for a tag as recorded by open_clip, for OpenAI's files QuickGELU, for other
    files and random weights according to the name (`-quickgelu` or not). A tag trained with GELU raises an error if the
    name ends with `-quickgelu`.

    Args:
        architecture: open_clip architecture, such as `ViT-B-32`, `PE-Core-B-16` or `ViT-B-16-SigLIP2`, or
            `local-dir:/path` for a folder that open_clip saved with configuration, weights, and tokenizer.
        weights: open_clip tag such as `openai` (from open_clip's cache or downloaded), local file (OpenAI archive or
            state dict; open_clip .pt, .bin or .safetensors), `folder` for the weights in a `local-dir:`, or null for
            random weights.
        preprocessing: open_clip tag whose frame preprocessing applies to a weights file, if the preprocessing differs
            between the tags of the architecture.
        tokenizer: folder with the files of the text tower's tokenizer, instead of the Hugging Face Hub repository in
            open_clip's configuration.
        language: language of the captions, such as `zho_Hans`, if the tokenizer marks it (NLLB).
        positions: number of token positions, such as 248, for captions longer than the text transformer's 77; the
            positions after the first 20 are then interpolated, as in Long-CLIP. None keeps the text transformer's.
        encoder_precision: data type of the matrices; `float16` trains them in float16, as the released code of the
            CLIP4Clip family does.
        switches: other arguments of `OpenClipEncoder`.
    """

    def __init__(
        self,
        architecture: Annotated[str, Role.FILE] = "ViT-B-32",
        weights: WeightFile = "openai",
        preprocessing: str | None = None,
        tokenizer: WeightFile = None,
        language: str | None = None,
        positions: int | None = None,
        encoder_precision: EncoderPrecision = "float32",
        **switches: Any,
    ) -> None:
        source = find_weights(architecture, weights, preprocessing)
        tensors, openai = ({}, False) if source.path is None else read_state_dict(source.path)
        configuration = model_configuration(architecture)
        quick_gelu = source.quick_gelu
        if quick_gelu is None:
            quick_gelu = openai or configuration.get("quick_gelu", False)
        text = _text_tower(architecture, tokenizer, language)
        model = build_model({**configuration, "text_cfg": text, "quick_gelu": quick_gelu}, encoder_precision)
        if source.path is not None:
            load_weights(model, tensors, f"{source.path} ({architecture})")
            other = f"{architecture}-quickgelu"
            if not quick_gelu and source.quick_gelu is None and other in open_clip.list_models():
                logger.warning(
                    "%s does not record the activation that it was trained with. Using GELU, as in the architecture "
                    "%s. If it was QuickGELU (as in all of OpenAI's weights), use the architecture %s",
                    source.path, architecture, other,
                )  # fmt: skip
            else:
                activation = "QuickGELU" if quick_gelu else "GELU"
                logger.info("%s with %s: weights from %s", architecture, activation, source.path)
        elif not do_weights_follow():
            logger.warning("%s starts from RANDOM weights (weights: none) and is untrained", architecture)
        if positions is not None:
            lengthen(model if isinstance(model, open_clip.CLIP) else model.text, positions, architecture)
            text["context_length"] = positions
        words = build_tokenizer(text)
        super().__init__(model, architecture, source.pixels, words, encoder_precision=encoder_precision, **switches)
        self._lengthened = positions is not None

    @override
    def positions(self, words: int) -> int:
        if self._lengthened and words > self.context_length:
            raise UserError(
                f"data.init_args.words is {words}, but encoder.positions is {self.context_length}. Set words to at "
                f"most {self.context_length}, or more positions."
            )
        return super().positions(words)

    @classmethod
    @override
    def required_files(
        cls,
        *,
        architecture: str = "ViT-B-32",
        weights: str | None = "openai",
        preprocessing: str | None = None,
        tokenizer: str | None = None,
        **options: Any,
    ) -> list[Path]:
        path = find_weights(architecture, weights, preprocessing).path
        text = _text_tower(architecture, tokenizer)
        folders = [Path(text[name]) for name in ("hf_model_name", "hf_tokenizer_name") if text.get(name)]
        return folders if path is None else [path, *folders]

    @classmethod
    @override
    def check_trainer(cls, precision: str, strategy: str, *, architecture: str = "ViT-B-32", **options: Any) -> None:
        super().check_trainer(precision, strategy, **options)
        if options.get("encoder_precision") == "float16":
            configuration = model_configuration(architecture)
            vision, text = configuration["vision_cfg"], configuration["text_cfg"]
            if "timm_model_name" in vision or "hf_model_name" in text or isinstance(vision.get("layers"), list | tuple):
                raise UserError(NO_FLOAT16.format(architecture))

    @classmethod
    @override
    def small(cls, **options: Any) -> dict[str, Any]:
        large = ("architecture", "weights", "preprocessing", "tokenizer", "language")
        switches = {name: value for name, value in options.items() if name not in large}
        switches |= {"encoder_precision": "float32"}  # rounding would hide differences
        if switches.get("patch_shift"):  # it is that of the last blocks of twelve
            vision = {"width": 64, "layers": 12, "patch_size": 8, "image_size": 32}
            sizes = {"embed_dim": 64, "vision_cfg": vision, "text_cfg": {"width": 64, "heads": 1, "layers": 1}}
            return {"class_path": "SizedClipEncoder", "init_args": {"configuration": sizes} | switches}
        sizes = {"width": 64, "image_size": 32, "patch_size": 8, "text_layers": 4, "vision_layers": 1}
        if switches.get("token_merging"):  # of four frames instead of twelve
            fewer = {"frames": 4, "clip_blocks": [1, 2], "joined": [2, 2]}
            switches |= {"token_merging": {"class_path": "TempMe", "init_args": fewer}}
            sizes["vision_layers"] = 4
        return {"class_path": "TinyClipEncoder", "init_args": sizes | switches}


class SizedClipEncoder(OpenClipEncoder):
    """CLIP of any size with random weights, which are replaced by those of a checkpoint.

    Recipes use `ClipEncoder` with a name; `tvr convert` writes this class for sizes without one.

    Args:
        configuration: open_clip's configuration of the model, as in its JSON files.
        encoder_precision: Same as for `ClipEncoder`.
        switches: other arguments of `OpenClipEncoder`.
    """

    def __init__(
        self, configuration: dict[str, Any], encoder_precision: EncoderPrecision = "float32", **switches: Any
    ) -> None:
        model = build_model(configuration, encoder_precision)
        super().__init__(model, "CLIP of these sizes", encoder_precision=encoder_precision, **switches)

    @override
    def temporal_initialization(self, layers: int) -> None:
        return None  # the checkpoint also provides the weights of the temporal transformer


def build_model(configuration: dict[str, Any], encoder_precision: EncoderPrecision) -> nn.Module:
    """Build a randomly initialized open_clip model from a configuration as in open_clip's JSON files.

    For `float16`, LayerNorms compute half-precision input in float32.
    """
    configuration = dict(configuration)
    vision, text = dict(configuration.pop("vision_cfg")), dict(configuration.pop("text_cfg"))
    custom = configuration.pop("custom_text", False) or "hf_model_name" in text
    # The CLIP weights replace the weights of the towers, so nothing needs to be downloaded.
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False
    if "hf_model_name" in text:
        text["hf_model_pretrained"] = False
    kind: Any = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    if "multimodal_cfg" in configuration:
        kind = open_clip.CoCa
    cast_dtype = torch.float16 if encoder_precision == "float16" else None
    model: nn.Module = kind(vision_cfg=vision, text_cfg=text, cast_dtype=cast_dtype, **configuration)
    return model


def _text_tower(architecture: str, tokenizer: str | None = None, language: str | None = None) -> dict[str, Any]:
    """Return open_clip's `text_cfg` with the local folders of the transformers model and tokenizer that it names."""
    text = dict(model_configuration(architecture)["text_cfg"])
    if text.get("hf_model_name"):
        name = text["hf_model_name"]
        missing = f"the configuration of {architecture}'s text tower {name} is missing"
        fix = how_to_download(f"{name} config.json")
        text["hf_model_name"] = str(repository_folder(name, ["config.json"], missing, fix, files=["config.json"]))
    if text.get("hf_tokenizer_name"):
        source = str(tokenizer or local_folder(architecture) or text["hf_tokenizer_name"])
        missing = f"the tokenizer {source} of {architecture} is missing"
        fix = f"{how_to_download(text['hf_tokenizer_name'])}, or name a folder: encoder.tokenizer=/path/to/folder"
        text["hf_tokenizer_name"] = str(repository_folder(source, VOCABULARIES, missing, fix, files=TOKENIZER_FILES))
    if language is not None:
        if not text.get("hf_tokenizer_name"):
            raise UserError(
                f"encoder.language is {language}, but the tokenizer of {architecture} has no language tokens"
            )
        text["tokenizer_kwargs"] = {**(text.get("tokenizer_kwargs") or {}), "language": language}
    return text


def openai_configuration(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return open_clip's configuration of the CLIP in a state dict with OpenAI's names; its heads are 64 wide."""

    def blocks(tower: str) -> int:
        return sum(name.startswith(tower) and name.endswith("ln_1.weight") for name in tensors)

    try:
        width, _, patch_size, _ = tensors["visual.conv1.weight"].shape
        side = math.isqrt(tensors["visual.positional_embedding"].shape[0] - 1)
        context_length, text_width = tensors["positional_embedding"].shape
        return {
            "embed_dim": tensors["text_projection"].shape[1],
            "quick_gelu": True,
            "vision_cfg": {
                "width": width, "layers": blocks("visual.transformer.resblocks."), "patch_size": patch_size,
                "image_size": side * patch_size, "head_width": min(64, width),
            },
            "text_cfg": {
                "width": text_width, "layers": blocks("transformer.resblocks."), "context_length": context_length,
                "vocab_size": tensors["token_embedding.weight"].shape[0], "heads": max(1, text_width // 64),
            },
        }  # fmt: skip
    except (KeyError, ValueError) as error:
        raise UserError(f"not an OpenAI CLIP state dict with a vision transformer: {error}") from error
