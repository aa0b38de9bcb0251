"""Digests of what decides the results of a run: its recipe, and the files that it reads."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from tvr_lightning.config import recipe_files
from tvr_lightning.config.recipe_files import read_recipe

LOCAL_DIR = "local-dir:"  # open_clip's prefix for a folder with a whole model
ANNOTATIONS = {".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet"}


def digest(*parts: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def resolve(recipes: Sequence[Path], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of recipes, later ones over earlier ones, with nested settings over all of them."""
    return reduce(_merge, [*(_read(path, path.stat().st_mtime_ns) for path in recipes), settings], {})


@cache
def _read(path: Path, _changed: int) -> dict[str, Any]:
    return read_recipe(path)  # hundreds of runs share a few files, and YAML is slow


def _merge(under: Any, over: Any) -> Any:
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{key: _merge(under.get(key), value) for key, value in over.items()}}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted options, such as `{"data.init_args.split": "7k"}`, as nested mappings, as in a recipe."""
    return reduce(_merge, (recipe_files.nested(option, value) for option, value in settings.items()), {})


def lookup(recipe: Any, option: str) -> Any:
    """Return the value of a dotted option, or None if the recipe does not set it."""
    for name in option.split("."):
        recipe = recipe.get(name) if isinstance(recipe, dict) else None
    return recipe


def file_fingerprint(name: str, every_file: bool) -> str | None:
    """Return the digest of a file or folder, or None if it does not exist.

    Unless `every_file`, only annotations are read, and other files, such as videos, count by name and size.
    """
    path = Path(name.removeprefix(LOCAL_DIR)).expanduser()
    if path.is_file():
        return _content(path, path.stat().st_mtime_ns)
    if not path.is_dir():
        return None
    found: list[tuple[str, str | int]] = []
    seen: set[str] = set()  # folders; linked ones may link back
    for place, folders, names in os.walk(path, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        for file in filter(Path.is_file, (Path(place) / name for name in names)):
            status, is_read = file.stat(), every_file or file.suffix.lower() in ANNOTATIONS
            content = _content(file, status.st_mtime_ns) if is_read else status.st_size
            found.append((str(file.relative_to(path)), content))
    return digest(sorted(found))


@cache
def data_fingerprint(folder: Path) -> str:
    """Return the digest of a dataset's folder, or `absent`."""
    return file_fingerprint(str(folder), every_file=False) or "absent"


@cache
def _content(path: Path, _changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
