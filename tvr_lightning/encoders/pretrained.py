"""Weights of a recipe: a local file, an open_clip tag, or none."""

import difflib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import huggingface_hub
import open_clip
from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME
from open_clip.factory import LOCAL_DIR_PREFIX
from open_clip.pretrained import download_pretrained, get_pretrained_cfg
from open_clip.transform import PreprocessCfg, merge_preprocess_dict

from tvr_lightning.encoders.hub import MissingWeightsError, probe
from tvr_lightning.errors import UserError
from tvr_lightning.media.preparation import Interpolation, SquareMode

logger = logging.getLogger(__name__)

WITHOUT_WEIGHTS = "Set encoder.weights to a file, or add --config recipes/fixture.yaml."
_FOLLOW: ContextVar[bool] = ContextVar("weights_follow", default=False)


@contextmanager
def weights_follow() -> Iterator[None]:
    """Build encoders without loading weights, because a checkpoint replaces them or their values do not matter.

    Settings that open_clip records for a tag are known without its weights, which are not searched or downloaded.
    """
    before = _FOLLOW.set(True)
    try:
        yield
    finally:
        _FOLLOW.reset(before)


def do_weights_follow() -> bool:
    """Return whether an encoder can currently skip its weights, as inside `weights_follow`."""
    return _FOLLOW.get()


@dataclass(frozen=True)
class WeightSource:
    """Source of weights, with the preprocessing of the frames that they were trained on, except for their size."""

    path: Path | None  # None for random weights, or if a checkpoint provides them
    quick_gelu: bool | None  # None if the source does not record it
    pixels: PreprocessCfg


def local_folder(architecture: str) -> Path | None:
    """Return the folder in `local-dir:/path`, as saved by open_clip, or None for other names."""
    if not architecture.startswith(LOCAL_DIR_PREFIX):
        return None
    return Path(architecture.removeprefix(LOCAL_DIR_PREFIX)).expanduser()


def model_configuration(architecture: str) -> dict[str, Any]:
    """Return open_clip's configuration of an architecture, or of a folder that open_clip saved."""
    if architecture.startswith("hf-hub:"):
        raise UserError(
            f"architecture {architecture} would be downloaded whenever the encoder is built. Download it once and name "
            "its folder: local-dir:/path/to/folder"
        )
    if (folder := local_folder(architecture)) is not None:
        return dict(_saved_configuration(folder)["model_cfg"])
    configuration = open_clip.get_model_config(architecture)
    if configuration is None:
        near = difflib.get_close_matches(architecture, open_clip.list_models(), n=4, cutoff=0.4)
        raise UserError(
            f"architecture {architecture!r} is unknown to open_clip {open_clip.__version__}"
            + (f"; close names: {', '.join(near)}" if near else "")
        )
    return dict(configuration)


def _saved_configuration(folder: Path) -> dict[str, Any]:
    path = folder / "open_clip_config.json"
    if not path.is_file():
        raise MissingWeightsError(f"architecture local-dir:{folder}: looked for {path.absolute()}")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        dict(content["model_cfg"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a configuration that open_clip saved: {error!r}") from error
    return content


def frame_preprocessing(settings: Mapping[str, Any], source: str) -> PreprocessCfg:
    """Return the frame preprocessing of an open_clip tag or folder (`source`); missing settings are those of CLIP."""
    found = {**merge_preprocess_dict(PreprocessCfg(), dict(settings)), "size": PreprocessCfg.size}
    supported = {"interpolation": get_args(Interpolation), "resize_mode": get_args(SquareMode)}
    for name, choices in (supported | {"fill_color": (0,), "mode": ("RGB",)}).items():
        if found[name] not in choices:
            raise UserError(
                f"{source} preprocesses frames with {name} {found[name]!r}, which is not supported. Supported: "
                + ", ".join(map(str, choices))
            )
    for name in ("mean", "std"):
        found[name] = tuple(map(float, found[name]))
        if len(found[name]) != 3:
            raise UserError(f"{source} has a {name} of {len(found[name])} channels; expected RGB")
    return PreprocessCfg(**found)


def find_weights(architecture: str, weights: str | None, preprocessing: str | None = None) -> WeightSource:
    """Return the source of weights; a tag that is not cached is downloaded through open_clip.

    Args:
        architecture: open_clip's name, with or without `-quickgelu`, or `local-dir:/path`.
        weights: Path of a file, an open_clip tag of this architecture, `folder` for the weights in a `local-dir:`, or
            None or "none".
        preprocessing: Tag whose frame preprocessing applies to a file, if the architecture's tags differ in it.
    """
    quick_gelu, folder = bool(model_configuration(architecture).get("quick_gelu", False)), local_folder(architecture)
    name = str(weights)
    path = None if weights in (None, "none") else Path(name).expanduser()
    if folder is not None:
        settings = _saved_configuration(folder).get("preprocess_cfg") or {}
        pixels = frame_preprocessing(settings, f"{folder}/open_clip_config.json")
        if path is None or do_weights_follow():
            return WeightSource(None, quick_gelu, pixels)
        saved = [folder / HF_SAFE_WEIGHTS_NAME, folder / HF_WEIGHTS_NAME] if name == "folder" else []
        for file in (path, *saved):
            if file.is_file():
                return WeightSource(file, quick_gelu, pixels)
        if saved:
            raise MissingWeightsError(f"{folder.absolute()} contains neither {saved[0].name} nor {saved[1].name}")
        raise UserError(
            f"encoder.weights is {name!r}, but local-dir:{folder} has no tags. Use folder for the weights in it, "
            "a file, or null for random weights."
        )
    base = architecture.removesuffix("-quickgelu")
    tags = {
        tag: get_pretrained_cfg(model, tag)
        for model in (base, architecture)
        for tag in open_clip.list_pretrained_tags_by_model(model)
    }
    if preprocessing is not None and preprocessing not in tags:
        raise UserError(f"encoder.preprocessing is {preprocessing!r}; the tags of {architecture}: {', '.join(tags)}")

    def pixels_of(tag: str) -> PreprocessCfg:
        return frame_preprocessing(tags[tag], f"open_clip's tag {tag}")

    if path is None or path.is_file():
        candidates = [pixels_of(tag) for tag in ([preprocessing] if preprocessing else tags)] or [PreprocessCfg()]
        agree = all(pixels == candidates[0] for pixels in candidates)
        if path is not None and not agree:
            logger.warning(
                "%s does not record the preprocessing of its training frames, and the tags of %s differ in it. Using "
                "CLIP's preprocessing. Set encoder.preprocessing to the tag that it was published under: %s",
                path, architecture, ", ".join(tags),
            )  # fmt: skip
        return WeightSource(path, None, candidates[0] if agree else PreprocessCfg())
    tag = name.lower().replace("-", "_")
    if tag not in tags:
        if os.sep in name or path.suffix in (".pt", ".pth", ".bin", ".safetensors"):
            raise MissingWeightsError(f"no weights file {path.absolute()}", WITHOUT_WEIGHTS)
        raise UserError(
            f"encoder.weights is {name!r}: no file of that name and no open_clip tag of {architecture}; its tags: "
            + (", ".join(sorted(tags)) or "none")
        )
    trained_with_quick_gelu = bool(tags[tag].get("quick_gelu", False))
    if architecture.endswith("-quickgelu") and not trained_with_quick_gelu:
        raise UserError(
            f"QuickGELU mismatch: the architecture {architecture} uses QuickGELU, but open_clip's weights {name!r} "
            f"were trained with GELU. Use the architecture {base}"
        )
    found = None if do_weights_follow() else _obtain(architecture, name, tags[tag])
    # An architecture with QuickGELU but without it in its name (roberta-ViT-B-32) has no other weights.
    return WeightSource(found, trained_with_quick_gelu or quick_gelu, pixels_of(preprocessing or tag))


def _obtain(architecture: str, weights: str, tag: dict[str, Any]) -> Path:
    """Return the file of a tag from a cache or a download, which is tried only if the server responds."""
    looked, failure, addresses = [], "", []
    repository, filename = os.path.split(tag.get("hf_hub", ""))
    if repository:
        safe = Path(filename).with_suffix(".safetensors").name if filename else HF_SAFE_WEIGHTS_NAME
        for name in (safe, filename or HF_WEIGHTS_NAME):
            cached = huggingface_hub.try_to_load_from_cache(repository, name)
            if isinstance(cached, str):
                return Path(cached)
        looked.append(huggingface_hub.constants.HF_HUB_CACHE)
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            addresses.append(f"{huggingface_hub.constants.ENDPOINT}/{repository}")
    if url := tag.get("url"):
        cached_file = Path("~/.cache/clip").expanduser() / Path(urlsplit(url).path).name
        if cached_file.is_file():
            return Path(download_pretrained(tag, prefer_hf_hub=False))  # verifies the checksum in the URL
        looked.append(str(cached_file))
        addresses.append(url)
    for address in addresses:
        try:
            probe(address)
            return Path(download_pretrained(tag, prefer_hf_hub=address != url))
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "reason", error)  # of a URLError
            looked.append(urlsplit(address).netloc)
            failure = f" ({getattr(reason, 'strerror', None) or reason})"
    missing = f"no weights {weights!r} for {architecture} in {', '.join(looked)}{failure}"
    raise MissingWeightsError(missing, WITHOUT_WEIGHTS)
