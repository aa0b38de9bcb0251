"""Profile cards: the cost of a method, one JSON file per method and encoder, in `profiles/` next to the run cards."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tvr_lightning.reproduce.profile.costs import Costs
from tvr_lightning.reproduce.runs.card import CardError, read_record, write_record


@dataclass
class ProfileCard:
    """Record of one profile: its inputs and the measured costs."""

    name: str  # <method>-<encoder>; name of the file
    method: str
    encoder: str  # class and architecture
    options: dict[str, Any]
    batch: int
    queries: int
    frames: int
    words: int
    image_size: int
    repeats: int  # measurements of each time
    precision: str
    costs: Costs
    environment: dict[str, Any]  # versions, git state, machine, device, and date
    schema: int = 3


def write_profile(card: ProfileCard, folder: Path) -> Path:
    """Write a profile atomically, over one of the same name, and return its path."""
    return write_record(card, folder / f"{card.name}.json")


def read_profiles(folder: Path) -> list[ProfileCard]:
    """Read all profiles of a folder, sorted by name; raises `CardError` if one is unusable."""
    profiles, fix = [], "delete it and rerun `tvr profile`"
    for path in sorted(folder.glob("*.json")):
        raw = read_record(path, ProfileCard, fix)
        if wrong := {item.name for item in fields(Costs)} ^ set(raw["costs"]):
            raise CardError(f"{path}: missing or unknown fields {', '.join(sorted(wrong))}; {fix}")
        profiles.append(ProfileCard(**{**raw, "costs": Costs(**raw["costs"])}))
    return profiles
