"""Finds the weights that a recipe names: a local file, an open_clip tag, or none."""

from __future__ import annotations

import difflib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import open_clip
from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME, OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.pretrained import download_pretrained, get_pretrained_cfg

from tvr_lightning.errors import MissingAssetError

PROBE_SECONDS = 5.0


_FOLLOW: ContextVar[bool] = ContextVar("weights_follow", default=False)


@contextmanager
def weights_follow() -> Iterator[None]:
    """Build encoders for the weights of a checkpoint, which come next.

    What a tag of open_clip's says of them is known without them: they are neither looked for nor downloaded.
    """
    before = _FOLLOW.set(True)
    try:
        yield
    finally:
        _FOLLOW.reset(before)


def do_weights_follow() -> bool:
    """Whether an encoder that is built now gets its weights from a checkpoint."""
    return _FOLLOW.get()


class MissingWeightsError(MissingAssetError):
    """The weights are neither on this machine nor to be had; says what was looked for, where, and what helps.

    Attributes:
        looked_for: the same without what helps, which is another option where there is no recipe.
    """

    def __init__(self, message: str, looked_for: str | None = None) -> None:
        super().__init__(message)
        self.looked_for = looked_for or message


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from and how the pixels they were trained on were prepared.

    Attributes:
        path: file on this machine; None for random initialisation, or where a checkpoint brings the weights.
        quick_gelu: whether they were trained with QuickGELU; None where the source does not say.
        mean, std: of the pixels in [0, 1], per RGB channel.
    """

    path: Path | None
    quick_gelu: bool | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def model_configuration(architecture: str) -> dict[str, Any]:
    """open_clip's configuration of an architecture.

    Raises:
        ValueError: open_clip does not know the name, or the encoder cannot use the architecture.
    """
    if architecture.startswith("hf-hub:"):
        raise ValueError(
            f"architecture {architecture} would be fetched from the network whenever the encoder is built; download it "
            "once and name its folder, local-dir:/path/to/folder"
        )
    configuration = open_clip.get_model_config(architecture)
    if configuration is None:
        near = difflib.get_close_matches(architecture, open_clip.list_models(), n=4, cutoff=0.4)
        raise ValueError(
            f"architecture {architecture!r} is unknown to open_clip {open_clip.__version__}"
            + (f"; close names: {', '.join(near)}" if near else "")
        )
    text = configuration["text_cfg"]
    obstacle = None
    if "multimodal_cfg" in configuration:
        obstacle = "is a captioning model whose text sentence is no token position"
    elif "hf_model_name" in text:
        obstacle = f"takes its text tower {text['hf_model_name']} from the transformers library"
    elif "hf_tokenizer_name" in text:
        obstacle = f"needs the tokenizer {text['hf_tokenizer_name']}, not CLIP's byte pairs"
    if obstacle:
        raise ValueError(
            f"architecture {architecture} {obstacle}; sentence and word features as the papers define them need a CLIP "
            "text transformer, such as ViT-B-32, ViT-B-16 or ViT-L-14"
        )
    return dict(configuration)


def find_weights(architecture: str, weights: str | None) -> WeightSource:
    """Find what `weights` names, downloading a tag through open_clip where it is not cached.

    Args:
        architecture: open_clip's name, with or without `-quickgelu`.
        weights: path of a file, an open_clip tag of this architecture, or None or "none".

    Raises:
        MissingWeightsError: no such file, or a tag that is neither cached nor downloadable.
        ValueError: neither a file nor a tag, or a tag trained with another activation than the name says.
    """
    configuration = model_configuration(architecture)
    tags = _tags(architecture)
    mean, std = _pixel_statistics(list(tags.values()))
    if weights is None or weights == "none":
        return WeightSource(None, None, mean, std)
    path = Path(weights).expanduser()
    if path.is_file():
        return WeightSource(path, None, mean, std)
    tag = tags.get(weights.lower().replace("-", "_"))
    if tag is None:
        raise _unknown(architecture, weights, sorted(tags))
    quick_gelu = bool(tag.get("quick_gelu", False))
    if configuration.get("quick_gelu", False) and not quick_gelu:
        raise ValueError(
            f"QuickGELU mismatch: the name {architecture} asks for QuickGELU, but open_clip's weights {weights!r} were "
            f"trained with GELU; use the architecture {_without_suffix(architecture)}"
        )
    mean, std = _pixel_statistics([tag])
    found = None if do_weights_follow() else _obtain(architecture, weights, tag)
    return WeightSource(found, quick_gelu, mean, std)


def _without_suffix(architecture: str) -> str:
    return architecture.removesuffix("-quickgelu")


def _tags(architecture: str) -> dict[str, dict[str, Any]]:
    base = _without_suffix(architecture)
    return {
        tag: get_pretrained_cfg(name, tag)
        for name in (base, architecture)
        for tag in open_clip.list_pretrained_tags_by_model(name)
    }


def _pixel_statistics(tags: list[dict[str, Any]]) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and std that the tags agree on, else those of OpenAI's CLIP."""
    found = {(tuple(tag["mean"]), tuple(tag["std"])) for tag in tags}
    return found.pop() if len(found) == 1 else (OPENAI_DATASET_MEAN, OPENAI_DATASET_STD)


def _unknown(architecture: str, weights: str, tags: list[str]) -> Exception:
    if "/" in weights or os.sep in weights or Path(weights).suffix in (".pt", ".pth", ".bin", ".safetensors"):
        return MissingWeightsError(
            f"encoder.weights names the file {weights}, looked for at {Path(weights).expanduser().absolute()}: no such "
            "file. Expected an OpenAI archive or state dict (.pt), or an open_clip checkpoint (.pt, .bin, "
            f".safetensors) of {architecture}. " + _way_out(),
            looked_for=f"no weights file {weights}: looked for {Path(weights).expanduser().absolute()}",
        )
    return ValueError(
        f"encoder.weights is {weights!r}: no file of that name and no open_clip tag of {architecture}; its tags: "
        + (", ".join(tags) or "none")
    )


def _way_out() -> str:
    return (
        "Without weights, add `--config recipes/fixture.yaml`: it trains a tiny encoder from scratch on the synthetic "
        "dataset."
    )


def _obtain(architecture: str, weights: str, tag: dict[str, Any]) -> Path:
    looked: list[str] = []
    cause: Exception | None = None
    if tag.get("hf_hub"):
        repository, filename = os.path.split(tag["hf_hub"])
        for name in _hub_names(filename):
            cached = huggingface_hub.try_to_load_from_cache(repository, name)
            if isinstance(cached, str):
                return Path(cached)
            looked.append(f"{huggingface_hub.constants.HF_HUB_CACHE} ({repository}, {name})")
    if tag.get("url"):
        cached_file = Path("~/.cache/clip").expanduser() / Path(urlsplit(tag["url"]).path).name
        if cached_file.is_file():
            return Path(download_pretrained(tag, prefer_hf_hub=False))  # verifies the checksum in the url
        looked.append(str(cached_file))
    for prefer_hub, address in ((True, _hub_address(tag)), (False, tag.get("url"))):
        if not address:
            continue
        try:
            _probe(address)
            return Path(download_pretrained(tag, prefer_hf_hub=prefer_hub))
        except (OSError, RuntimeError) as error:
            looked.append(f"{address} ({error})")
            cause = error
    looked_for = f"no weights {weights!r} for {architecture}. Looked in: {'; '.join(looked)}"
    raise MissingWeightsError(
        f"{looked_for}. Expected layout: any file of that checkpoint, named by "
        f"encoder.weights=/path/to/{architecture}.pt (OpenAI archive or state dict, open_clip .pt or .safetensors), or "
        f"the Hugging Face cache filled on a machine with network. {_way_out()}",
        looked_for=looked_for,
    ) from cause


def _hub_names(filename: str) -> list[str]:
    if not filename:
        return [HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME]
    return [str(Path(filename).with_suffix(".safetensors")), filename]


def _hub_address(tag: dict[str, Any]) -> str | None:
    if not tag.get("hf_hub") or huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    return f"{huggingface_hub.constants.ENDPOINT}/{os.path.split(tag['hf_hub'])[0]}"


def _probe(address: str) -> None:
    """Ask for the head of the server's front page: an unreachable host must not cost minutes of retries.

    Raises:
        OSError: nobody answers.
    """
    parts = urlsplit(address)
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}/", method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()  # an answer, whatever it says
