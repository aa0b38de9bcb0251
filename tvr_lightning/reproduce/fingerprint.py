"""What decides a number, as short hashes: code, data, weights and options. A run with the same ones is not repeated."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import tvr_lightning

# These rooms decide which runs there are and what is said of them, not what a run computes.
WITHOUT_INFLUENCE = {"parity", "reproduce", "search", "cli.py"}
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
    """Return the fingerprint of the package's source, apart from the rooms that compute no score."""
    folder = Path(tvr_lightning.__file__).parent
    files = sorted(path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] not in WITHOUT_INFLUENCE)
    return digest([[str(path.relative_to(folder)), _file(path)] for path in files])


@cache
def data_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a dataset's folder: annotations by content, videos by name and size.

    Args:
        folder: of one dataset. A folder that is not there has the fingerprint `absent`.
    """
    if not folder.is_dir():
        return "absent"
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = _file(path) if path.suffix.lower() in ANNOTATIONS else path.stat().st_size
            found.append([str(path.relative_to(folder)), content])
    return digest(found)


@cache
def weights_fingerprint(weights: str | None) -> str:
    """Return what names weights: the hash of a file, or the tag, whose file open_clip checks by its own checksum.

    Args:
        weights: of the encoder, as the recipe has them; None for random ones.
    """
    if weights is None or weights == "none":
        return "random"
    path = Path(weights).expanduser()
    return _file(path) if path.is_file() else f"tag {weights}"


def _file(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()[:LENGTH]
