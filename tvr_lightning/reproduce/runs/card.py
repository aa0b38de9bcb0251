"""Run cards: one JSON file per run, and a table of its ranks; every number of a report comes from one.

`<key>.json` contains the fields of `Card`, and `<key>.parquet` the ranks. A run that stores features has no ranks.
"""

import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tvr_lightning.errors import UserError
from tvr_lightning.files import write_whole

CardDirection = Literal["text_to_video", "video_to_text"]
FIX = "delete it and rerun `tvr reproduce`"


@dataclass
class Card:
    """Record of one run."""

    key: str  # name of the card's files
    name: str  # <table>/<run> that it was made for
    status: Literal["finished", "failed"]
    run: dict[str, Any]  # fields of the PlannedRun
    error: str | None = None  # last lines of a failed run
    results: dict[str, Any] | None = None  # content of results.json; of a run that stores features, its ExtractReport
    checkpoint: str | None = None  # of the weights that produced the results
    features: str | None = None  # folder that the run stored
    steps: int | None = None  # of the weights
    epochs: int | None = None
    seconds: float | None = None  # of the run's process; None if it resumed an interrupted one
    peak_memory_mib: float | None = None
    peak_device_memory_mib: float | None = None  # None without a GPU
    schema: int = 5

    def metrics(self, direction: CardDirection) -> dict[str, float]:
        """Return the metrics of one direction, R@K in percent; empty without retrieval results."""
        return dict(self.results.get(direction, {})) if self.results else {}

    def accuracy(self) -> float | None:
        """Return the accuracy of question answering in percent, or None."""
        return float(self.results["evaluation"]["accuracy"]) if self.results and "evaluation" in self.results else None


def write_record(record: Any, path: Path) -> Path:
    """Write a dataclass as JSON, atomically, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(asdict(record), indent=2) + "\n").encode())
    return path


def read_record(path: Path, kind: Any, fix: str) -> dict[str, Any]:
    """Return the fields of a dataclass that `write_record` wrote; `fix` ends the messages about an unusable file."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is incomplete ({error}); {fix}") from error
    found = raw.get("schema") if isinstance(raw, dict) else None
    if found != kind.schema:
        raise UserError(f"{path} has schema {found}, but this version reads schema {kind.schema}; {fix}")
    if wrong := {item.name for item in fields(kind)} ^ set(raw):
        raise UserError(f"{path}: missing or unknown fields {', '.join(sorted(wrong))}; {fix}")
    return raw


def read_card(path: Path) -> Card:
    """Read one card; raise UserError if it is incomplete, of another version, or a renamed copy."""
    card = Card(**read_record(path, Card, FIX))
    if card.key != path.stem:
        raise UserError(f"{path} is the card of run {card.key}: {card.name} would have two cards. Delete one of them.")
    ranks = path.with_suffix(".parquet")
    ranked = card.run["verb"] == "extract" or ranks.is_file()
    if card.status == "finished" and (card.results is None or not ranked):
        raise UserError(f"{path} is incomplete: its status is finished, but results or {ranks.name} are missing; {FIX}")
    return card


def read_cards(folder: Path) -> dict[str, Card]:
    """Read all cards of a folder, by key; empty if the folder does not exist."""
    return {path.stem: read_card(path) for path in sorted(folder.glob("*.json"))}


def peak_memory_mib() -> float | None:
    """Return the maximum resident memory of this process so far, or None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
