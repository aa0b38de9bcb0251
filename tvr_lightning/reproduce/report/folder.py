"""From the cards of a folder back to the tables they were made for; nothing but cards and table recipes is read."""

from __future__ import annotations

from pathlib import Path

from tvr_lightning.reproduce.report.cells import TableView, view_table
from tvr_lightning.reproduce.runs.card import Card, CardError, card_path, read_cards
from tvr_lightning.reproduce.runs.plan import PlannedRun
from tvr_lightning.reproduce.runs.runner import Folders
from tvr_lightning.reproduce.tables import known_tables, load_table


def read_folder(out: Path) -> dict[str, Card]:
    """Read the cards that `tvr reproduce --out` left.

    Args:
        out: its folder.

    Raises:
        CardError: there is no card, one cannot be used, or two claim the same line with the same seed.
    """
    folder = Folders(out).cards
    cards = read_cards(folder)
    if not cards:
        raise CardError(f"{folder} contains no run cards. Create some with `tvr reproduce TABLE --out {out}`.")
    claimed: dict[tuple[str, int | None], str] = {}
    for card in cards.values():
        for claim in card.run["claims"]:
            other = claimed.setdefault((claim, card.run["seed"]), card.key)
            if other != card.key:
                raise CardError(
                    f"{card_path(folder, other)} and {card_path(folder, card.key)} are both cards of the run {claim} "
                    f"with seed {card.run['seed']}. Delete the one with older code or other settings."
                )
    return cards


def views_of(cards: dict[str, Card], out: Path, recipes: Path) -> list[TableView]:
    """Return every table that the cards claim lines of, sorted by name.

    Args:
        cards: by key.
        out: folder of the cards' invocation.
        recipes: folder of the recipes, for the tables' printed lines.

    Raises:
        CardError: no card claims a line, or one claims a line of a table that the recipes lack.
    """
    claims = {claim.partition("/")[0] for card in cards.values() for claim in card.run["claims"]}
    if not claims:
        raise CardError(
            f"{Folders(out).cards}: no card belongs to a row of a table. Run `tvr reproduce` to completion."
        )
    known = set(known_tables(recipes))
    unknown = sorted(claims - known)
    if unknown:
        raise CardError(f"The cards belong to tables that are missing in {recipes / 'tables'}: {', '.join(unknown)}")
    views = []
    for name in sorted(claims):
        table = load_table(name, recipes)
        runs = {run.name: _made(f"{name}/{run.name}", cards) for run in table.runs}
        views.append(view_table(table, runs, Folders(out).cards))
    return views


def _made(claim: str, cards: dict[str, Card]) -> list[tuple[PlannedRun, Card]]:
    """The runs that stand for a line, by seed."""
    own = [card for card in cards.values() if claim in card.run["claims"]]
    own.sort(key=lambda card: (card.run["seed"] is not None, card.run["seed"] or 0))
    return [(PlannedRun(**card.run), card) for card in own]
