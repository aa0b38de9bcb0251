"""What decides a number, as short hashes: code, data, weights and options. A run with the same ones is not repeated."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import tvr_lightning

# These packages decide which runs there are and what is said of them, not what a run computes or its audit finds.
WITHOUT_INFLUENCE = {"authors", "importing", "reproduce", "search", "cli.py", "verbs"}
LOCAL_DIR = "local-dir:"  # what open_clip calls a folder with a whole model
ANNOTATIONS = {".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet"}
LENGTH = 16


def digest(*parts: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of plain values.

    Args:
        parts: anything that JSON can hold.
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:LENGTH]


@cache
def code_fingerprint() -> str:
    """Return the fingerprint of the source of all packages that compute scores or audit them."""
    folder = Path(tvr_lightning.__file__).parent
    files = sorted(path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] not in WITHOUT_INFLUENCE)
    return digest([[str(path.relative_to(folder)), _file(path)] for path in files])


def config_fingerprint(recipes: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """Return the fingerprint of a run's recipes, by content, and of the table's own values on top of them.

    Args:
        recipes: files, later ones on top of earlier ones.
        settings: nested as in a recipe.
    """
    return digest([read_recipe(path) for path in recipes], settings)


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe's values; empty for an empty file. Hundreds of runs share a few files, and YAML is slow."""
    return _read(path, path.stat().st_mtime_ns)


@cache
def _read(path: Path, _changed: int) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


@cache
def data_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a folder: annotations by content, anything else, such as videos, by name and size.

    Args:
        folder: of one dataset or feature store, links in it included. One that is not there is `absent`.
    """
    if not folder.is_dir():
        return "absent"
    found = []
    for path in sorted(_files_below(folder)):
        content = _file(path) if path.suffix.lower() in ANNOTATIONS else path.stat().st_size
        found.append([str(path.relative_to(folder)), content])
    return digest(found)


def _files_below(folder: Path) -> Iterator[Path]:
    """Every file; videos often lie on another disk, behind a link, which may not lead back to where it came from."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (path for path in (Path(place) / name for name in names) if path.is_file())


def named_fingerprint(name: str) -> str | None:
    """Return the fingerprint of the file or folder that an option names; None where it names neither.

    Args:
        name: a path, or a tag such as `openai`.
    """
    path = Path(name).expanduser()
    return _file(path) if path.is_file() else data_fingerprint(path) if path.is_dir() else None


def model_fingerprint(name: str) -> str | None:
    """Return the fingerprint of weights, a tokenizer or a whole model by the content of the files.

    Args:
        name: A file, a folder, or `local-dir:FOLDER`; None is returned for other names, such as a tag.
    """
    path = Path(name.removeprefix(LOCAL_DIR)).expanduser()
    if path.is_dir():
        return digest([[str(file.relative_to(path)), _file(file)] for file in sorted(_files_below(path))])
    return _file(path) if path.is_file() else None


def weights_fingerprint(weights: str | None) -> str:
    """Return what names weights: the hash of a file, or the tag, whose file open_clip checks by its own checksum.

    Args:
        weights: of the encoder, as the recipe has them; None for random ones.
    """
    if weights is None or weights == "none":
        return "random"
    return model_fingerprint(weights) or f"tag {weights}"


def _file(path: Path) -> str:
    status = path.stat()
    return _content(path, status.st_size, status.st_mtime_ns)


@cache
def _content(path: Path, _size: int, _changed: int) -> str:
    """Hash a file; hundreds of runs share a few large ones."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()[:LENGTH]
