"""The papers' efficiency columns beside profiles and training times of the same methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvr_lightning.reproduce.profile.card import ProfileCard
from tvr_lightning.reproduce.profile.costs import STAGES
from tvr_lightning.reproduce.published import PublishedRow, published_rows
from tvr_lightning.reproduce.runs.card import Card

TABLES = (
    ("TC-MGC", "14"), ("TC-MGC", "1a"), ("TC-MGC", "1b"), ("TC-MGC", "2"), ("TC-MGC", "3"),
    ("GARE", "10"), ("GARE", "11"), ("GAID", "6"), ("GAID", "7"), ("DPDV", "S8"),
)  # fmt: skip
CLASSES = {
    "CLIP4Clip": "CLIP4Clip", "X-Pool": "XPool", "DRL": "DRL", "UCoFiA": "UCoFiA", "X-CLIP": "XCLIP",
    "X-CLIP (base)": "XCLIP", "TC-MGC": "TCMGC", "TC-MGC (ours)": "TCMGC", "T-MASS": "TMASS", "GARE": "GARE",
    "CLIP4Clip vs GARE": "GARE", "GAID": "GAID", "DPDV": "DPDV",
}  # fmt: skip
"""Class of the method that a printed one is."""

COMPARED = ("parameters, M", "FLOPs of one pair's inference, G", "ms per video", "MiB, training")
"""Columns of a profile that stand beside the print."""


@dataclass
class EfficiencyLine:
    """A printed line on efficiency, and what was measured of its method.

    Attributes:
        published: the row.
        words: what it prints on efficiency.
        profiles: of the method, on any encoder.
        runs: finished training runs that stand for the printed line's table and method.
    """

    published: PublishedRow
    words: str
    profiles: list[ProfileCard]
    runs: list[Card]


def efficiency_lines(profiles: Sequence[ProfileCard], cards: Sequence[Card]) -> list[EfficiencyLine]:
    """Return every printed line on efficiency whose method was profiled or trained.

    Args:
        profiles: of methods.
        cards: of runs.
    """
    lines = []
    for row in published_rows():
        words = _printed(row)
        if (row.paper, row.table) not in TABLES or not words:
            continue
        own = [profile for profile in profiles if profile.method == CLASSES.get(row.method)]
        runs = [card for card in cards if _trains(card, row)]
        if own or runs:
            lines.append(EfficiencyLine(row, words, own, runs))
    return lines


def _printed(row: PublishedRow) -> str:
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in row.extra.items() if name != "retrained_by_authors"]
    if row.speed_ms is not None:
        parts.append(f"{row.speed_ms:g} ms")
    if row.paper == "GARE":  # kept verbatim: name of the metric and its figures
        parts.append((row.variant or "").replace("\\times", " x ").replace("\\psi", "psi"))
    return ", ".join(parts)


def _trains(card: Card, row: PublishedRow) -> bool:
    """Whether a run stands for a line of the row's table and trains the row's method."""
    table = f"{row.paper.lower()}-{row.table.lower()}/"
    method = (card.results or {}).get("method")
    named = any(claim.startswith(table) for claim in card.run["claims"])
    return card.status == "finished" and card.run["verb"] == "fit" and named and method == CLASSES.get(row.method)


@dataclass(frozen=True)
class Cost:
    """A number of a profile.

    Attributes:
        field: of `Costs`, as a dotted path.
        value: the number; None where it was not measured.
        made: what was made of the field.
    """

    field: str
    value: float | None
    made: str = ""


def costs_of(profile: ProfileCard) -> dict[str, Cost]:
    """Return the numbers of a profile by the heading of their column.

    Args:
        profile: of a method.
    """
    costs, flops = profile.costs, profile.costs.flops_by_stage
    # Scoring is counted over all pairs of the batch, the rest over its items.
    items = sum(value for stage, value in flops.items() if stage not in ("training_step", "score"))
    inference = items / profile.batch + flops["score"] / profile.batch**2
    return {
        "parameters, M": Cost("parameters", costs.parameters / 1e6, "M"),
        "FLOPs of one pair's inference, G": Cost("flops_by_stage", inference / 1e9, "inference per pair, G"),
        **{
            f"GFLOPs, {words}": Cost(f"flops_by_stage.{stage}", flops[stage] / 1e9, "G")
            for stage, words in STAGES.items()
        },
        "step, ms": Cost("training_step_ms", costs.training_step_ms),
        "ms per video": Cost("ms_per_video", costs.ms_per_video),
        "MiB, inference": Cost("peak_inference_mib", costs.peak_inference_mib),
        "MiB, training": Cost("peak_training_mib", costs.peak_training_mib),
    }


def efficiency(profiles: Sequence[ProfileCard], cards: Sequence[Card]) -> dict[str, Any]:
    """Return what the page's section on efficiency shows: printed lines beside profiles, and all of every profile.

    Args:
        profiles: of methods.
        cards: of runs.
    """
    costs = {profile.name: costs_of(profile) for profile in profiles}
    columns = tuple(dict.fromkeys(column for found in costs.values() for column in found))
    return {
        "lines": efficiency_lines(profiles, cards) if profiles else [],
        "costs": costs,
        "columns": columns,
        "compared": COMPARED,
    }
