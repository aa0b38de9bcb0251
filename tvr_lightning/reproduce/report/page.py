"""The report as one HTML page that needs nothing else: styles, drawings and pictures are in it.

Every number bears where it is from: `data-card` (keys) and `data-field` name a field of run cards, with `data-of` what
was made of it over seeds or queries; `data-published` names the line of the paper's text; `data-figures` and
`data-field` a value of a run's file of figures; `data-profile` and `data-field` a field of a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tvr_lightning.reproduce.profile.card import ProfileCard
from tvr_lightning.reproduce.report.cells import NAMES, TableView, run_fields
from tvr_lightning.reproduce.report.efficiency import efficiency
from tvr_lightning.reproduce.report.figures.drawing import Arrays, Chart
from tvr_lightning.reproduce.report.render import render
from tvr_lightning.reproduce.runs.card import Card

TITLE = "Text-video retrieval: published and measured"


@dataclass
class RunSection:
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
    runs: Sequence[RunSection],
    between: Sequence[Chart] = (),
    profiles: Sequence[ProfileCard] = (),
) -> str:
    """Return the whole page.

    Args:
        views: tables, in order.
        runs: finished and failed runs, in order.
        between: charts over several runs.
        profiles: what methods cost.
    """
    return render(
        "page.html",
        title=TITLE,
        names=NAMES,
        views=views,
        runs=runs,
        between=between,
        profiles=profiles,
        run_fields=run_fields,
        **efficiency(profiles, [section.card for section in runs]),
    )
