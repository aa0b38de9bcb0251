"""The report as one HTML page that needs nothing else: styles, drawings and pictures are in it.

Every number bears where it is from: `data-card` (keys) and `data-field` name a field of run cards, with `data-of` what
was made of it over seeds or queries; `data-published` names the line of the paper's text; `data-figures` and
`data-field` a value of a run's file of figures; `data-profile` and `data-field` a field of a profile.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field

import yaml

from tvr_lightning.reproduce.profile.card import ProfileCard
from tvr_lightning.reproduce.report.cells import (
    DATE,
    DIRECTIONS,
    NAMES,
    TableView,
    field_of,
    in_words,
    legend_of,
    run_fields,
)
from tvr_lightning.reproduce.report.contests import Contest, as_json
from tvr_lightning.reproduce.report.efficiency import efficiency
from tvr_lightning.reproduce.report.figures.drawing import Arrays, Chart
from tvr_lightning.reproduce.report.figures.overview import draw_overview
from tvr_lightning.reproduce.report.formats import comma_separated, latex
from tvr_lightning.reproduce.report.leaderboard import leaderboard
from tvr_lightning.reproduce.report.render import render
from tvr_lightning.reproduce.runs.card import Card
from tvr_lightning.reproduce.runs.commands import command_of

TITLE = "Text-video retrieval: published and measured"
MADE = {
    "Newest run": DATE,
    "Versions": "results.environment.packages.tvr-lightning",
    "Machines": "results.environment.machine",
}
"""Where the numbers are from, and the field of a card that says it."""


@dataclass
class RunSection:
    """What the page says of one run.

    Attributes:
        card: its card.
        charts: curves and figures.
        arrays: what the figures were drawn from.
        curves: what it logged in training.
        missing: why there are no figures, or None.
    """

    card: Card
    charts: list[Chart] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)
    curves: Arrays = field(default_factory=dict)
    missing: str | None = None


def page(
    views: Sequence[TableView],
    runs: Sequence[RunSection],
    between: Sequence[Chart] = (),
    profiles: Sequence[ProfileCard] = (),
    contests: Sequence[Contest] = (),
) -> str:
    """Return the whole page.

    Args:
        views: tables, in order.
        runs: finished and failed runs, in order.
        between: charts over several runs.
        profiles: what methods cost.
        contests: runs whose queries can be browsed.
    """
    entries = leaderboard(views)
    return render(
        "page.html",
        title=TITLE,
        made=_made([section.card for section in runs]),
        entries=entries,
        legend=legend_of(entry.line for entry in entries),
        overview=draw_overview(entries),
        directions=list(DIRECTIONS),
        data_uri=_data_uri,
        comma_separated=comma_separated,
        latex=latex,
        command_of=command_of,
        recipe_of=_recipe_of,
        names=NAMES,
        views=views,
        runs=runs,
        between=between,
        profiles=profiles,
        contests=contests,
        contest_json=as_json,
        run_fields=run_fields,
        date_field=DATE,
        in_words=in_words,
        **efficiency(profiles, [section.card for section in runs]),
    )


def _made(cards: Sequence[Card]) -> dict[str, dict[str, tuple[str, str]]]:
    """Of MADE what the cards say: heading to value to the key of a card that says it and the field."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for words, path in MADE.items():
        values = {str(value): (card.key, path) for card in cards if (value := field_of(card, path)) is not None}
        newest = [max(values)] if words == "Newest run" and values else sorted(values)
        if newest:
            found[words] = {value: values[value] for value in newest}
    return found


def _recipe_of(card: Card) -> str:
    """A run's resolved recipe as YAML; empty where its card has none."""
    config = (card.results or {}).get("config")
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else ""


def _data_uri(text: str, kind: str) -> str:
    """A text as an address, so that a link on the page saves it."""
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"
