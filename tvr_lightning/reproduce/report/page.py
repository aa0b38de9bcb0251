"""The report as one HTML page that needs nothing else: styles, drawings and pictures are in it.

Every number bears where it is from: `data-card` (keys) and `data-field` name a field of run cards, with `data-of` what
was made of it over seeds or queries; `data-published` names the line of the paper's text; `data-figures` and
`data-field` a value of a run's file of figures; `data-profile` and `data-field` a field of a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from tvr_lightning.reproduce.profile.card import ProfileCard
from tvr_lightning.reproduce.report.cells import TableView
from tvr_lightning.reproduce.report.efficiency import efficiency_section
from tvr_lightning.reproduce.report.figures.drawing import Arrays, Chart, escape
from tvr_lightning.reproduce.report.tables_html import run_facts, table_section
from tvr_lightning.reproduce.runs.card import Card

TITLE = "Text-video retrieval: published and measured"


@dataclass
class RunPart:
    """What the page says of one run.

    Attributes:
        card: its card.
        charts: curves and figures.
        arrays: what the figures were drawn from.
        missing: why there are no figures, or None.
    """

    card: Card
    charts: list[Chart] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)
    missing: str | None = None


def page(
    views: Sequence[TableView],
    runs: Sequence[RunPart],
    general: Sequence[Chart] = (),
    profiles: Sequence[ProfileCard] = (),
) -> str:
    """Return the whole page.

    Args:
        views: tables, in order.
        runs: finished and failed runs, in order.
        general: charts over several runs.
        profiles: what methods cost.
    """
    css = files("tvr_lightning.reproduce.report").joinpath("page.css").read_text(encoding="utf-8")
    contents = [f'<li><a href="#{escape(view.name)}">{escape(view.name)}</a></li>' for view in views]
    if general:
        contents.append('<li><a href="#between-runs">Between runs</a></li>')
    if profiles:
        contents.append('<li><a href="#efficiency">What the methods cost</a></li>')
    contents.append('<li><a href="#runs">Runs and their figures</a></li>')
    synthetic = any(not view.comparable for view in views)
    warning = (
        '<p class="warn">Some of these runs are not comparable with the published ones: the titles of the tables say '
        "which and why.</p>"
        if synthetic
        else ""
    )
    between = f'<h2 id="between-runs">Between runs</h2>{_charts(general, "", {})}' if general else ""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{TITLE}</title>\n<style>\n{css}</style>\n</head>\n<body>",
            f"<header><h1>{TITLE}</h1>{warning}",
            f'<nav aria-label="Contents"><ul>{"".join(contents)}</ul></nav></header>\n<main>',
            *[table_section(view) for view in views],
            between,
            efficiency_section(profiles, [part.card for part in runs]),
            '<h2 id="runs">Runs and their figures</h2>',
            *[_run(part) for part in runs],
            "</main>\n<footer>Every number comes from a run card, the run's file of figures or a profile beside it, or "
            "from the papers.</footer>",
            "</body>\n</html>\n",
        ]
    )


def _run(part: RunPart) -> str:
    card = part.card
    also = [claim for claim in card.run["claims"] if claim != card.name]
    said = f'<p class="soft">Stands for {escape(", ".join(also))} too.</p>' if also else ""
    missing = f"<p>No figures: {escape(part.missing)}</p>" if part.missing else ""
    seed = f", seed {card.run['seed']}" if card.run["seed"] is not None else ""
    # A link into a closed section opens it; a link to the section itself would not.
    return (
        f"<details><summary>{escape(card.name)}{escape(seed)}</summary>"
        f'<div class="run" id="run-{card.key}">{said}{run_facts(card)}'
        f"{missing}{_charts(part.charts, card.key, part.arrays)}</div></details>"
    )


def _charts(charts: Sequence[Chart], key: str, arrays: Arrays) -> str:
    return f'<div class="charts">{"".join(_chart(chart, key, arrays) for chart in charts)}</div>' if charts else ""


def _chart(chart: Chart, key: str, arrays: Arrays) -> str:
    facts = "".join(
        f'<li>{escape(fact.words)}: <span data-figures="{key}" data-field="{escape(fact.field)}">'
        f"{float(arrays[fact.field]):.3g}</span>{escape(fact.unit)}</li>"
        for fact in chart.facts
    )
    wide = " wide" if chart.html else ""
    inner = chart.html or chart.svg
    group = f' role="group" aria-label="{escape(chart.alt)}"' if chart.html else ""
    return (
        f'<section class="chart{wide}"{group}><h3>{escape(chart.title)}</h3>{inner}'
        + (f'<ul class="facts">{facts}</ul>' if facts else "")
        + (f'<p class="soft">{escape(chart.note)}</p>' if chart.note else "")
        + "</section>"
    )
