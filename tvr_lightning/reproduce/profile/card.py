"""Profile cards: what a method costs, one JSON file per method and encoder, in `profiles/` beside the run cards."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tvr_lightning.reproduce.profile.costs import Costs
from tvr_lightning.reproduce.runs.card import CardError, read_record, write_record

SCHEMA = 2


@dataclass
class ProfileCard:
    """One profile.

    Attributes:
        name: `<method>-<encoder>`, also of the file.
        method: title of the method.
        encoder: class and architecture of the encoder.
        options: of the method, as its recipe resolved them.
        batch, queries, frames, words, image_size: what was run.
        repeats: measurements behind each time.
        precision: of the forward passes whose time and memory were measured, as Lightning names it.
        costs: what was measured.
        environment: versions, git state, machine, date.
        schema: of this file.
    """

    name: str
    method: str
    encoder: str
    options: dict[str, Any]
    batch: int
    queries: int
    frames: int
    words: int
    image_size: int
    repeats: int
    precision: str
    costs: Costs
    environment: dict[str, Any]
    schema: int = SCHEMA


def write_profile(card: ProfileCard, folder: Path) -> Path:
    """Write a profile so that it is there as a whole or not at all; one of the same name is replaced.

    Args:
        card: of a method.
        folder: of the profiles.
    """
    return write_record(asdict(card), folder / f"{card.name}.json")


def read_profile(path: Path) -> ProfileCard:
    """Read one profile.

    Raises:
        CardError: it is half-written, from another schema version, or lacks fields.
    """
    way_out = "delete it and rerun `tvr profile`"
    raw = read_record(path, {item.name for item in fields(ProfileCard)}, SCHEMA, way_out)
    wrong = {item.name for item in fields(Costs)} ^ set(raw["costs"])
    if wrong:
        raise CardError(f"{path}: missing or unknown fields {', '.join(sorted(wrong))}; {way_out}")
    return ProfileCard(**{**raw, "costs": Costs(**raw["costs"])})


def read_profiles(folder: Path) -> list[ProfileCard]:
    """Read every profile of a folder, sorted by name; none where there is no folder."""
    return [read_profile(path) for path in sorted(folder.glob("*.json"))]
