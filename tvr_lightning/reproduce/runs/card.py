"""Run cards: one JSON file per run, with ranks per query beside it; every number of a table is found in one.

`<key>.json` holds the fields of `Card`; `<key>.parquet` one row per query: `direction`, `index` (place of the text or
video in its split), `video` (whose text or video it is), `better` and `tied` (see `Ranks`). Of question answering,
which ranks nothing, a right answer has none better than it, and a wrong one has one. A run that stores features has no
queries and leaves no such file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.files import write_whole

SCHEMA = 3
CardDirection = Literal["text_to_video", "video_to_text"]
QueryKind = Literal["text_to_video", "video_to_text", "question"]


class CardError(UserError, ValueError):
    """A card cannot be used; the message names the file and what to do."""


@dataclass
class Card:
    """One run.

    Attributes:
        key: fingerprint of what decides the run; name of the card's files.
        name: `<table>/<run>` it was made for.
        status: `finished`, or `failed` with its `error`.
        run: the planned run, all fields of `PlannedRun`: what it read, what it shared, what lay on top of it.
        error: the last lines of a failed run.
        results: what `results.json` of the run holds (`evaluation.results.Results`): method, dataset, protocol,
            metrics, resolved config, precision, seed, skipped files, versions, git state, machine, date; of a run that
            stores features, what its `ExtractReport` holds.
        checkpoint: file of the weights that made the results.
        features: folder of the features that it stored.
        steps, epochs: optimiser steps and epochs behind the weights.
        seconds: wall time from the start of the run's process to the card. Of a run that was interrupted, also that of
            the earlier processes, each up to the checkpoint that the next one went on from.
        peak_memory_mib: largest resident memory of the process.
        peak_device_memory_mib: largest memory allocated on the GPU; None without one.
        warnings: sentences that were warned, each once.
        schema: of this file.
    """

    key: str
    name: str
    status: Literal["finished", "failed"]
    run: dict[str, Any]
    error: str | None = None
    results: dict[str, Any] | None = None
    checkpoint: str | None = None
    features: str | None = None
    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    peak_memory_mib: float | None = None
    peak_device_memory_mib: float | None = None
    warnings: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def words(self) -> str:
        """The line that the run was made for, and its seed where it was given one."""
        return self.name if self.run["seed"] is None else f"{self.name}, seed {self.run['seed']}"

    def metrics(self, direction: CardDirection) -> dict[str, float]:
        """Return the metrics of one direction; R@K in percent. Empty for a failed run and for question answering."""
        return dict(self.results.get(direction, {})) if self.results else {}

    def accuracy(self) -> float | None:
        """Return the share of questions answered right, in percent; None for a run that ranks."""
        return float(self.results["evaluation"]["accuracy"]) if self.results and "evaluation" in self.results else None


def write_record(record: dict[str, Any], path: Path) -> Path:
    """Write a card as JSON so that it is there as a whole or not at all; return its path.

    Args:
        record: its fields as plain values.
        path: of the file, whose folder is made where it is absent.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(record, indent=2) + "\n").encode())
    return path


def read_record(path: Path, names: set[str], schema: int, way_out: str) -> dict[str, Any]:
    """Return the fields of a card.

    Args:
        path: of the file.
        names: of the fields that it must have.
        schema: its version.
        way_out: what errors tell to do.

    Raises:
        CardError: it is half-written, of another version, or has other fields.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CardError(f"{path} is incomplete ({error}); {way_out}") from error
    found = raw.get("schema") if isinstance(raw, dict) else None
    if found != schema:
        raise CardError(f"{path} has schema {found}, but this version reads schema {schema}; {way_out}")
    if names != set(raw):
        raise CardError(f"{path}: missing or unknown fields {', '.join(sorted(names ^ set(raw)))}; {way_out}")
    return dict(raw)


def card_path(folder: Path, key: str) -> Path:
    """Return where the card of a run lies."""
    return folder / f"{key}.json"


def write_card(card: Card, folder: Path) -> Path:
    """Write a card so that it is there as a whole or not at all.

    Args:
        card: of one run.
        folder: of the cards.
    """
    return write_record(asdict(card), card_path(folder, card.key))


def read_card(path: Path) -> Card:
    """Read one card.

    Raises:
        CardError: it is half-written, from another schema version, lacks fields, or bears another run's name.
    """
    way_out = "delete it and rerun `tvr reproduce`"
    raw = read_record(path, {item.name for item in fields(Card)}, SCHEMA, way_out)
    if raw["key"] != path.stem:
        raise CardError(
            f"{path} is the card of run {raw['key']}, which belongs in {raw['key']}.json, so {raw['name']} would have "
            "two cards. Delete one of them."
        )
    card = Card(**raw)
    ranked = card.run["verb"] == "extract" or ranks_path(path).is_file()
    if card.status == "finished" and (card.results is None or not ranked):
        raise CardError(
            f"{path} is incomplete: its status is finished, but results or {ranks_path(path).name} are missing; "
            f"{way_out}"
        )
    return card


def read_cards(folder: Path) -> dict[str, Card]:
    """Read every card of a folder, by key; empty where there is no folder.

    Raises:
        CardError: one of them cannot be used, or two claim the same run.
    """
    return {path.stem: read_card(path) for path in sorted(folder.glob("*.json"))}


def ranks_path(card: Path) -> Path:
    """Return where the ranks beside a card lie."""
    return card.with_suffix(".parquet")


def write_ranks(path: Path, ranked: Mapping[QueryKind, tuple[Ranks, Tensor]]) -> None:
    """Write the ranks of every query.

    Args:
        path: the parquet file.
        ranked: direction to the ranks of its Q queries, by place in the split, and the (Q,) int64 video of each.
    """
    parts = []
    for direction, (ranks, video) in ranked.items():
        columns = {"index": ranks.index, "video": video, "better": ranks.better, "tied": ranks.tied}
        frame = pd.DataFrame({name: column.cpu().numpy() for name, column in columns.items()})
        parts.append(frame.assign(direction=direction))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, pd.concat(parts, ignore_index=True).to_parquet(index=False))


def read_ranks(key: str, folder: Path, direction: QueryKind) -> tuple[Ranks, Tensor]:
    """Read the stored ranks of a finished run.

    Args:
        key: of its card.
        folder: of the cards.
        direction: whose queries.

    Returns:
        The ranks by rising query index, and the (Q,) int64 video of each query.
    """
    frame = pd.read_parquet(ranks_path(card_path(folder, key)))
    frame = frame[frame["direction"] == direction].sort_values("index")
    better, tied, index, video = (torch.tensor(frame[name].to_numpy()) for name in ("better", "tied", "index", "video"))
    return Ranks(better=better, tied=tied, index=index), video
