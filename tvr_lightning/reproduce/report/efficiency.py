"""The papers' efficiency columns beside profiles and training times of the same methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvr_lightning.reproduce.profile.card import ProfileCard
from tvr_lightning.reproduce.published import PublishedRow, published_rows
from tvr_lightning.reproduce.report.figures.drawing import escape
from tvr_lightning.reproduce.report.tables_html import NOTHING, printed_place
from tvr_lightning.reproduce.runs.card import Card

TABLES = (
    ("TC-MGC", "14"), ("TC-MGC", "1a"), ("TC-MGC", "1b"), ("GARE", "10"), ("GARE", "11"), ("GAID", "6"), ("GAID", "7"),
    ("DPDV", "S8"),
)  # fmt: skip
CLASSES = {
    "CLIP4Clip": "CLIP4Clip", "X-Pool": "XPool", "DRL": "DRL", "UCoFiA": "UCoFiA", "X-CLIP": "XCLIP",
    "X-CLIP (base)": "XCLIP", "TC-MGC": "TCMGC", "TC-MGC (ours)": "TCMGC", "T-MASS": "TMASS", "GARE": "GARE",
    "CLIP4Clip vs GARE": "GARE", "GAID": "GAID", "DPDV": "DPDV",
}  # fmt: skip
"""Class of the method that a printed one is."""

_COLUMNS = (
    "parameters, M",
    "FLOPs of one pair's inference, G",
    "ms per video",
    "MiB, training",
    "training, s",
)
_STAGES = ("encode_video", "encode_text", "video_layers", "text_layers", "score", "training_step")


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


def efficiency_section(profiles: Sequence[ProfileCard], cards: Sequence[Card]) -> str:
    """Return both tables: printed beside measured, and all of every profile; nothing without profiles.

    Args:
        profiles: of methods.
        cards: of runs.
    """
    if not profiles:
        return ""
    printed = "".join(_line(line) for line in efficiency_lines(profiles, cards))
    head = "".join(f'<th scope="col" class="name">{name}</th>' for name in ("table", "method", "published")) + "".join(
        f'<th scope="col">{name}</th>' for name in _COLUMNS
    )
    first = _table("Published beside measured", head, printed)
    names = (
        "method",
        "encoder",
        "device",
        "batch",
        "parameters, M",
        *(f"{s.replace('_', ' ')}, GFLOPs" for s in _STAGES),
    )
    names += ("step, ms", "ms per video", "MiB, inference", "MiB, training")
    second = _table(
        "Profiles", "".join(f'<th scope="col">{name}</th>' for name in names), "".join(map(_profile, profiles))
    )
    return (
        '<section><h2 id="efficiency">What the methods cost</h2><p class="soft">Milliseconds per video: encoding one '
        "video (media in memory) and scoring all queries of the profile against it. The papers' machines and "
        "definitions are others, so times and memory do not compare; parameters and FLOPs do where the encoder is the "
        f"same. FLOPs count a multiplication and an addition as two.</p>{first}{second}</section>"
    )


def _table(title: str, head: str, rows: str) -> str:
    return (
        f'<h3>{title}</h3><div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><thead><tr>{head}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _line(line: EfficiencyLine) -> str:
    row = line.published
    where = f'data-published="{escape(printed_place(row))}"'
    method = f"{row.method}, {row.variant}" if row.variant and row.paper != "GARE" else row.method
    cells = (
        f'<td class="name" {where}>{escape(row.paper)} {escape(row.table)}</td>'
        f'<th scope="row" class="name">{escape(method)}</th>'
    )
    cells += f'<td class="name" {where}>{escape(line.words)}</td>'
    for field in ("parameters", "inference", "ms_per_video", "peak_training_mib"):
        values = "<br>".join(_number(profile, field) for profile in line.profiles)
        cells += f'<td class="here">{values or NOTHING}</td>'
    seconds = "<br>".join(
        f'<span data-card="{card.key}" data-field="seconds">{card.seconds:.1f}</span>' for card in line.runs
    )
    return f'<tr>{cells}<td class="here">{seconds or NOTHING}</td></tr>'


def _number(profile: ProfileCard, field: str) -> str:
    costs = profile.costs
    if field == "inference":
        # Scoring is counted over all pairs of the batch, the rest over its items.
        items = sum(value for stage, value in costs.flops_by_stage.items() if stage not in ("training_step", "score"))
        flops = items / profile.batch + costs.flops_by_stage["score"] / profile.batch**2
        return _marked(profile, "flops_by_stage", flops / 1e9, "inference per pair, G")
    if field == "parameters":
        return _marked(profile, field, costs.parameters / 1e6, "M")
    value = getattr(costs, field)
    return NOTHING if value is None else _marked(profile, field, float(value))


def _marked(profile: ProfileCard, field: str, value: float, of: str = "") -> str:
    made = f' data-of="{of}"' if of else ""
    return f'<span data-profile="{profile.name}" data-field="costs.{field}"{made}>{value:.2f}</span>'


def _profile(profile: ProfileCard) -> str:
    costs = profile.costs
    cells = f'<th scope="row" class="name">{escape(profile.method)}</th>'
    cells += f"<td>{escape(profile.encoder)}</td>"
    cells += (
        f'<td data-profile="{profile.name}" data-field="environment.device">{escape(profile.environment["device"])}'
    )
    cells += f'</td><td data-profile="{profile.name}" data-field="batch">{profile.batch}</td>'
    cells += f"<td>{_number(profile, 'parameters')}</td>"
    for stage in _STAGES:
        cells += f"<td>{_marked(profile, f'flops_by_stage.{stage}', costs.flops_by_stage[stage] / 1e9, 'G')}</td>"
    for field in ("training_step_ms", "ms_per_video", "peak_inference_mib", "peak_training_mib"):
        cells += f"<td>{_number(profile, field)}</td>"
    return f"<tr>{cells}</tr>"
