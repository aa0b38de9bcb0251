"""Tables as recipes: which run stands for which printed line. One file per table in recipes/tables.

```yaml
paper: gare
table: "1"
baseline: clip4clip                  # optional: the run that the others are compared with; or a list
note: Other lines are published only. # optional: what a reader of the table must know, printed below it
runs:
  clip4clip:
    config: [clip4clip.yaml]         # recipes, later ones on top of earlier ones, relative to the recipes' folder
    backbone: vit-b-16               # optional: recipes/backbone/<name>.yaml
    set: {model.init_args.words: 24} # optional: values on top
    on_fixture: fixture-vqa          # optional: recipes/<name>.yaml on top of the fixture's
    trained_by: other-run            # optional: evaluates that run's weights instead of training
    trains: false                    # optional: evaluates the encoder's pretrained weights, nothing is trained
    row: {method: CLIP4Clip}         # the printed line, by fields of PublishedRow
  other-run:
    config: [xpool.yaml]
    shows: 15 frames                 # in place of `row`: a line of its own, for which the paper prints no numbers
  third-run:
    config: [xpool.yaml, variants/two-stage.yaml]
    row: {method: X-Pool}
    shows: two stages                # with `row`: a line below the printed one, of the same method, data and backbone
```

Printed lines that no run names stay in the table as published only; a table of such lines alone has `runs: {}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.published import (
    Entry,
    PublishedError,
    PublishedRow,
    is_published,
    select_published,
    unprinted_entry,
    unprinted_row,
)

_SELECTORS = ("dataset", "split", "backbone", "method", "variant", "post_process")
_DIRECTIONS = ("t2v", "v2t")


class TableError(UserError, ValueError):
    """A table is unknown, or its file says what cannot be; the message names file, run and fix."""


@dataclass(frozen=True)
class TableRun:
    """One run of a table.

    Attributes:
        name: in the table.
        config: recipe files.
        settings: dotted option to value, on top of the recipes.
        row: field of `PublishedRow` to value: the printed line it stands for, or below which `shows` adds one.
        entry: that line, or the line that `shows` adds.
        backbone: recipe file of the backbone, where it is not the method's own; the synthetic fixture leaves it out.
        trained_by: name of the run whose weights it evaluates, or None.
        trains: whether it trains; without `trained_by` what does not is the encoder's pretrained weights.
        on_fixture: recipe file that goes on top of the fixture's, or None.
        shows: what it stands for where the paper prints no numbers; None where `row` says it.
        below: the printed line below which `shows` adds one, or None.
    """

    name: str
    config: tuple[Path, ...]
    settings: Mapping[str, Any]
    row: Mapping[str, Any]
    entry: Entry
    backbone: Path | None = None
    trained_by: str | None = None
    trains: bool = True
    on_fixture: Path | None = None
    shows: str | None = None
    below: Entry | None = None


@dataclass(frozen=True)
class TableRecipe:
    """One published table and the runs that stand for its lines.

    Attributes:
        name: of the file, such as `gare-1`.
        paper, table: as in the published numbers.
        runs: in the order of the file.
        baselines: runs that the others are compared with, each those of its own dataset and backbone.
        printed: whether the paper prints any number of it.
        note: what a reader of the table must know, to be printed below it; None where there is nothing.
    """

    name: str
    paper: str
    table: str
    runs: tuple[TableRun, ...]
    baselines: tuple[str, ...] = ()
    printed: bool = True
    note: str | None = None

    def published(self) -> list[PublishedRow]:
        """Return every printed row of the table, with a run or without, and the rows that `shows` adds."""
        rows = []
        for row in select_published(self.paper, self.table) if self.printed else []:
            below = [run.entry for run in self.runs if run.below == row.entry]
            rows += [row, *(unprinted_row(entry, row.direction) for entry in below if row.direction in _DIRECTIONS)]
        own = [run.entry for run in self.runs if run.shows is not None and run.below is None]
        return rows + [unprinted_row(entry, direction) for entry in own for direction in _DIRECTIONS]


@dataclass
class _File:
    """A table's file being read, so that messages can name it."""

    path: Path
    folder: Path
    paper: str = ""
    table: str = ""
    claimed: dict[Entry, str] = field(default_factory=dict)

    def error(self, text: str) -> TableError:
        return TableError(f"{self.path}: {text}")

    def keys(self, where: str, values: Any, needed: set[str], allowed: set[str]) -> dict[str, Any]:
        if not isinstance(values, dict):
            raise self.error(f"{where} must be a mapping, got {values!r}")
        wrong = sorted(set(values) - needed - allowed) + sorted(needed - set(values))
        if wrong:
            raise self.error(
                f"{where}: missing or unknown {', '.join(map(str, wrong))}; required: "
                f"{', '.join(sorted(needed)) or 'nothing'}; optional: {', '.join(sorted(allowed))}"
            )
        return values


def known_tables(recipes: Path) -> list[str]:
    """Return the names of the tables in `recipes`/tables, sorted."""
    return sorted(path.stem for path in (recipes / "tables").glob("*.yaml"))


def load_table(name: str, recipes: Path) -> TableRecipe:
    """Read recipes/tables/<name>.yaml and check it against the recipes and the published numbers.

    Args:
        name: such as `gare-1`.
        recipes: the folder of the recipes.

    Raises:
        TableError: unknown table, unknown key, a note that is no text, absent recipe, or a line that is not printed or
            claimed twice.
    """
    path = recipes / "tables" / f"{name}.yaml"
    if not path.is_file():
        known = known_tables(recipes)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0)
        meant = f"The most similar names are {', '.join(near)}. `ls {path.parent}` lists all." if near else ""
        raise TableError(f"There is no table {name!r}. {meant or f'{path.parent} contains no tables.'}")
    file = _File(path, recipes)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    raw = file.keys("the table", content, {"paper", "table", "runs"}, {"baseline", "note"})
    file.paper, file.table = str(raw["paper"]), str(raw["table"])
    if not isinstance(raw["runs"], dict):
        raise file.error("runs must be a mapping; use {} if the table is only published")
    printed = is_published(file.paper, file.table)
    if not printed and not any("shows" in values for values in raw["runs"].values() if isinstance(values, dict)):
        _printed(file)  # says what is printed
    runs = tuple(_run(file, str(run), values) for run, values in raw["runs"].items())
    names = {run.name: run for run in runs}
    for run in runs:
        if run.trained_by is not None and (run.trained_by not in names or not names[run.trained_by].trains):
            raise file.error(f"run {run.name}: trained_by {run.trained_by!r} is not a run of this table that trains")
    given = raw.get("baseline") or ()
    baselines = (given,) if isinstance(given, str) else tuple(given)
    for baseline in baselines:
        if baseline not in names:
            raise file.error(f"baseline {baseline!r} is not a run of this table. Available: {', '.join(names)}")
    note = raw.get("note")
    if note is not None and (not isinstance(note, str) or not note.strip()):
        raise file.error(f"note must be text, got {note!r}; remove it if it is empty")
    return TableRecipe(name, file.paper, file.table, runs, baselines, printed, note and note.strip())


def _run(file: _File, name: str, values: Any) -> TableRun:
    optional = {"row", "shows", "backbone", "on_fixture", "set", "trained_by", "trains"}
    raw = file.keys(f"run {name}", values, {"config"}, optional)
    if "row" not in raw and "shows" not in raw:
        raise file.error(
            f"run {name}: set row (a published row), shows (an additional row), or both (an additional row after the "
            "published one)"
        )
    trains = raw.get("trains", "trained_by" not in raw)
    if not isinstance(trains, bool) or (trains and "trained_by" in raw):
        raise file.error(
            f"run {name}: trains is {trains!r}; set it to true or false, and not to true if trained_by is set"
        )
    configs = tuple(file.folder / config for config in raw["config"])
    backbone = file.folder / "backbone" / f"{raw['backbone']}.yaml" if "backbone" in raw else None
    on_fixture = file.folder / f"{raw['on_fixture']}.yaml" if "on_fixture" in raw else None
    for config in (*configs, *([backbone] if backbone else []), *([on_fixture] if on_fixture else [])):
        if not config.is_file():
            raise file.error(f"run {name}: there is no recipe {config}")
    row = file.keys(f"run {name}, row", raw.get("row", {}), set(), set(_SELECTORS))
    shows = str(raw["shows"]) if "shows" in raw else None
    line = _entry(file, name, row) if "row" in raw else None
    entry, below = _shown(file, line, shows)
    if entry in file.claimed:
        what = f"published row {row}. Narrow" if shows is None else f"row {shows}. Rename"
        raise file.error(f"runs {file.claimed[entry]} and {name} have the same {what} one of them.")
    file.claimed[entry] = name
    settings = raw.get("set") or {}
    trained_by = raw.get("trained_by")
    return TableRun(name, configs, settings, row, entry, backbone, trained_by, trains, on_fixture, shows, below)


def _shown(file: _File, line: Entry | None, shows: str | None) -> tuple[Entry, Entry | None]:
    """Return what a run stands for and, where that is a line below a printed one, the printed one."""
    if line is None:
        return unprinted_entry(file.paper, file.table, shows or ""), None
    if shows is None:
        return line, None
    *fields, variant, post_process = line
    return (*fields, shows if variant is None else f"{variant}, {shows}", post_process), line


def _printed(file: _File) -> list[PublishedRow]:
    try:
        return select_published(file.paper, file.table)
    except PublishedError as error:
        raise file.error(str(error)) from error


def _entry(file: _File, name: str, row: Mapping[str, Any]) -> Entry:
    rows = _printed(file)
    entries = {r.entry: r for r in rows if all(getattr(r, key) == value for key, value in row.items())}
    if len(entries) != 1:
        printed = "; ".join(dict.fromkeys(_words(r) for r in (entries.values() if entries else rows)))
        raise file.error(
            f"run {name}: row {dict(row)} matches {len(entries)} published rows of {file.paper} table {file.table}, "
            f"not one. {'Candidates' if entries else 'Published'}: {printed}"
        )
    return next(iter(entries))


def _words(row: PublishedRow) -> str:
    values = {key: getattr(row, key) for key in _SELECTORS}
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)
