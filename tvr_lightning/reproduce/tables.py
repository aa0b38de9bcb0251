"""Tables as recipes: which run stands for which published row. One file per table in recipes/tables.

```yaml
paper: gare
table: "1"
baseline: clip4clip                  # optional: the run, or a list of runs, that the others are compared with
note: Other rows are published only. # optional: printed after the table
runs:                                # {} if the table is only published
  clip4clip:
    config: [clip4clip.yaml]         # recipes, later ones over earlier ones, in the folder of recipes
    backbone: vit-b-16               # optional: recipes/backbone/<name>.yaml
    set: {data.init_args.words: 24}  # optional: values over the recipes
    on_fixture: fixture-vqa          # optional: recipes/<name>.yaml over fixture.yaml
    trained_by: other-run            # optional: evaluates that run's weights instead of training
    trains: false                    # optional: evaluates the encoder's pretrained weights
    row: {method: CLIP4Clip}         # the published row, by fields of PublishedRow
  other-run:
    config: [xpool.yaml]
    shows: 15 frames                 # instead of `row`: an additional row, for which the paper has no numbers
  third-run:
    config: [xpool.yaml, variants/two-stage.yaml]
    row: {method: X-Pool}
    shows: two stages                # with `row`: an additional row after the published one
```
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.published import IDENTITY, Entry, PublishedRow, published_rows, select_published

_DIRECTIONS = ("t2v", "v2t")
_OPTIONAL = {"row", "shows", "backbone", "on_fixture", "set", "trained_by", "trains"}


@dataclass(frozen=True)
class TableRun:
    """One run of a table."""

    name: str
    config: tuple[Path, ...]
    settings: Mapping[str, Any]  # values by dotted option, over the recipes
    entry: Entry  # the row that the run stands for
    backbone: Path | None = None  # recipe that synthetic runs omit
    trained_by: str | None = None  # run whose weights it evaluates
    trains: bool = True
    on_fixture: Path | None = None  # recipe over fixture.yaml
    shows: str | None = None  # description of additional rows, one per direction


@dataclass(frozen=True)
class TableRecipe:
    """One published table and the runs that stand for its rows."""

    name: str
    paper: str
    table: str
    runs: tuple[TableRun, ...]
    rows: tuple[PublishedRow, ...]  # published ones, with or without a run, and additional ones
    baselines: tuple[str, ...]  # runs that the others of the same dataset and backbone are compared with
    note: str | None


def known_tables(recipes: Path) -> list[str]:
    """Return the names of the tables in `recipes`/tables, sorted."""
    return sorted(path.stem for path in (recipes / "tables").glob("*.yaml"))


def load_table(name: str, recipes: Path) -> TableRecipe:
    """Read recipes/tables/<name>.yaml, and check it against the recipes and the published rows."""
    path = recipes / "tables" / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, known_tables(recipes), n=3, cutoff=0)
        meant = f"The most similar names are {', '.join(near)}. `ls {path.parent}` lists all." if near else ""
        raise UserError(f"There is no table {name!r}. {meant or f'{path.parent} contains no tables.'}")
    try:
        return _table(name, recipes, yaml.safe_load(path.read_text(encoding="utf-8")))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _table(name: str, recipes: Path, content: Any) -> TableRecipe:
    raw = _keys("the table", content, {"paper", "table", "runs"}, {"baseline", "note"})
    paper = str(raw["paper"])
    table = str(raw["table"])
    note = raw.get("note")
    if not isinstance(raw["runs"], dict):
        raise UserError("runs must be a mapping; use {} if the table is only published")
    known = {(row.paper.lower(), row.table.lower()) for row in published_rows()}
    unprinted = (paper.lower(), table.lower()) not in known and any("shows" in run for run in raw["runs"].values())
    printed = [] if unprinted else select_published(paper, table)
    runs: dict[str, TableRun] = {}
    claimed: dict[Entry, str] = {}
    placed = list(enumerate(printed))
    for key, values in raw["runs"].items():
        run, rows = _run(str(key), values, recipes, printed, paper, table)
        if (first := claimed.setdefault(run.entry, run.name)) != run.name:
            same = f"row {run.shows}. Rename" if run.shows else "published row. Narrow"
            raise UserError(f"runs {first} and {run.name} have the same {same} one of them.")
        runs[run.name] = run
        if run.shows:  # rows that follow the published ones that they belong to
            after = (printed.index(row) if row in printed else len(printed) for row in rows)
            placed += zip(after, [row.unprinted(run.shows) for row in rows], strict=True)
    for run in runs.values():
        if run.trained_by is not None and (run.trained_by not in runs or not runs[run.trained_by].trains):
            raise UserError(f"run {run.name}: trained_by {run.trained_by!r} is not a run of this table that trains")
    given = raw.get("baseline") or ()
    baselines = (given,) if isinstance(given, str) else tuple(given)
    if unknown := [baseline for baseline in baselines if baseline not in runs]:
        raise UserError(f"baseline {unknown[0]!r} is not a run of this table. Available: {', '.join(runs)}")
    ordered = tuple(row for _, row in sorted(placed, key=lambda pair: pair[0]))
    return TableRecipe(name, paper, table, tuple(runs.values()), ordered, baselines, note and str(note).strip())


def _keys(where: str, values: Any, needed: set[str], allowed: set[str]) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"{where} must be a mapping, got {values!r}")
    if wrong := sorted(set(values) - needed - allowed) + sorted(needed - set(values)):
        raise UserError(
            f"{where}: missing or unknown {', '.join(map(str, wrong))}; required: "
            f"{', '.join(sorted(needed)) or 'nothing'}; optional: {', '.join(sorted(allowed))}"
        )
    return values


def _run(
    name: str, values: Any, recipes: Path, printed: list[PublishedRow], paper: str, table: str
) -> tuple[TableRun, list[PublishedRow]]:
    """Return a run and the rows that it stands for, or that its additional rows belong to."""
    raw = _keys(f"run {name}", values, {"config"}, _OPTIONAL)
    if raw.get("trains", False) is not False or {"trains", "trained_by"} <= set(raw):
        raise UserError(f"run {name}: trains is {raw['trains']!r}; omit it, or set it to false without trained_by")
    config = tuple(recipes / file for file in raw["config"])
    backbone = recipes / "backbone" / f"{raw['backbone']}.yaml" if "backbone" in raw else None
    on_fixture = recipes / f"{raw['on_fixture']}.yaml" if "on_fixture" in raw else None
    for file in (*config, backbone, on_fixture):
        if file is not None and not file.is_file():
            raise UserError(f"run {name}: there is no recipe {file}")
    if "row" in raw:
        rows = _rows(name, _keys(f"run {name}, row", raw["row"], set(), set(IDENTITY[2:])), printed)
    elif "shows" in raw:
        named = next((row.paper for row in published_rows() if row.paper.lower() == paper.lower()), paper)
        rows = [PublishedRow(named, table, None, None, None, direction, named, None) for direction in _DIRECTIONS]
    else:
        raise UserError(f"run {name}: set row (a published row), shows (an additional row), or both")
    entry = rows[0].entry
    shows = None
    if "shows" in raw:
        shows = str(raw["shows"])
        rows = [row for row in rows if row.direction in _DIRECTIONS]
        entry = rows[0].unprinted(shows).entry
    trains = not {"trains", "trained_by"} & set(raw)
    settings = raw.get("set") or {}
    return TableRun(name, config, settings, entry, backbone, raw.get("trained_by"), trains, on_fixture, shows), rows


def _rows(name: str, row: Mapping[str, Any], rows: list[PublishedRow]) -> list[PublishedRow]:
    """Return the directions of the one published row whose fields have the given values."""
    found = [each for each in rows if all(getattr(each, key) == value for key, value in row.items())]
    if (count := len({each.entry for each in found})) == 1:
        return found
    fields = [zip(IDENTITY[2:], each.entry[2:], strict=True) for each in found or rows]
    described = [", ".join(f"{key} {value}" for key, value in own if value is not None) for own in fields]
    raise UserError(
        f"run {name}: row {dict(row)} matches {count} published rows, not one. "
        f"{'Candidates' if found else 'Published'}: {'; '.join(dict.fromkeys(described))}"
    )
