"""From the cards of a folder back to the tables they were made for; nothing but cards and table recipes is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tvr_lightning.reproduce.report.cells import TableView, view_table
from tvr_lightning.reproduce.runs.card import Card, CardError, card_path, read_cards
from tvr_lightning.reproduce.runs.plan import SHARED_RECIPES, Plan, PlannedRun, Setting, Share
from tvr_lightning.reproduce.runs.runner import Folders
from tvr_lightning.reproduce.tables import TableRecipe, known_tables, load_table

_SYNTHETIC = re.compile(r"synthetic, (\d+) videos")


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
        raise CardError(f"{folder} holds no run cards; make some with `tvr reproduce TABLE --out {out}`")
    claimed: dict[tuple[str, int | None], str] = {}
    for card in cards.values():
        for claim in card.run["claims"]:
            other = claimed.setdefault((claim, card.run["seed"]), card.key)
            if other != card.key:
                raise CardError(
                    f"{card_path(folder, other)} and {card_path(folder, card.key)} both claim the line {claim} with "
                    f"seed {card.run['seed']}; delete the one of an older code or of other settings"
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
        raise CardError(f"{Folders(out).cards}: no card stands for a line of a table; run `tvr reproduce` to its end")
    known = set(known_tables(recipes))
    unknown = sorted(claims - known)
    if unknown:
        raise CardError(f"cards claim lines of the tables {', '.join(unknown)}, which {recipes / 'tables'} lacks")
    views = []
    for name in sorted(claims):
        table = load_table(name, recipes)
        views.append(view_table(table, _plan(table, cards, out, recipes), cards, Folders(out).cards))
    return views


def _plan(table: TableRecipe, cards: dict[str, Card], out: Path, recipes: Path) -> Plan:
    own = [card for card in cards.values() if any(claim.startswith(f"{table.name}/") for claim in card.run["claims"])]
    plan = Plan([table], _setting(own, table, out, recipes))
    for card in sorted(own, key=lambda card: (card.run["seed"] is not None, card.run["seed"] or 0)):
        run = PlannedRun(**card.run)
        plan.runs[run.key] = run
        for claim in run.claims:
            plan.chosen.setdefault(claim, []).append(run.key)
    return plan


def _setting(cards: list[Card], table: TableRecipe, out: Path, recipes: Path) -> Setting:
    """What held for the runs of a table: taken from their cards, synthetic as soon as one of them is."""
    synthetic = [_SYNTHETIC.match(str(card.run["fingerprints"]["data"])) for card in cards]
    videos = [int(found.group(1)) for found in synthetic if found]
    overlays = [path for card in cards if (path := _overlay(card, table))]
    return Setting(
        recipes,
        out,
        videos[0] if videos else None,
        overlays[0] if overlays else None,
        share=_shared([card.run for card in cards]),
    )


def _overlay(card: Card, table: TableRecipe) -> Path | None:
    """The recipe that was laid on top of a run; earlier cards do not say it, of which names have to do."""
    if "overlay" in card.run:
        found = card.run["overlay"]
        return Path(found["path"]) if found else None
    own = {path.name for run in table.runs for path in (*run.config, run.backbone, run.on_fixture) if path}
    own |= {"fixture.yaml", *SHARED_RECIPES.values()}
    return next((Path(config) for config in card.run["configs"] if Path(config).name not in own), None)


def _shared(runs: list[dict[str, Any]]) -> Share:
    """What runs shared, by what their cards name."""
    if any(run.get("store") for run in runs):
        return "features"
    return "encoder" if any(run.get("encoder_from") for run in runs) else "nothing"
