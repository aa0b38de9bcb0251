"""`tvr reproduce`: published tables run again, and what came out set beside the print."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape

from tvr_lightning.places import NewFolder
from tvr_lightning.progress import SECONDS
from tvr_lightning.ranges import Count, Range
from tvr_lightning.recipe_files import find_recipe, recipes_folder
from tvr_lightning.reproduce.report.sources import run_of_card
from tvr_lightning.reproduce.report.table_view import NOT_COMPARABLE, view_table, write_tables
from tvr_lightning.reproduce.runs.card import Card, read_cards
from tvr_lightning.reproduce.runs.engines import Engine, EngineError, EngineName, SlurmEngine, SlurmOptions
from tvr_lightning.reproduce.runs.forecast import duration, estimate, open_runs, state_of, time_left
from tvr_lightning.reproduce.runs.plan import Plan, Setting, Share, make_plan
from tvr_lightning.reproduce.runs.runner import Folders, run_plan
from tvr_lightning.reproduce.tables import TableError, load_table
from tvr_lightning.synthetic.generate import LEAST_VIDEOS


def run_reproduce(
    tables: list[str],
    only: str = "",
    seeds: str = "",
    dry_run: bool = False,
    out: NewFolder = Path("runs/reproduced"),
    recipes: Path = Path("recipes"),
    fixture: bool = False,
    fixture_videos: Annotated[int, Range(at_least=LEAST_VIDEOS)] = 500,
    overlay: Path | None = None,
    share: Share = "nothing",
    engine: EngineName = "local",
    partition: str | None = None,
    minutes: Count | None = None,
    gpus: Annotated[int, Range(at_least=0)] | None = None,
    memory_gib: Count | None = None,
    max_parallel_jobs: Count | None = None,
) -> int:
    """Rerun published tables, and write the results next to the published ones as markdown, CSV, and LaTeX.

    Without $TVR_DATA, every run uses the synthetic dataset in its dataset's layout. Finished runs are not repeated. The
    exit status is 1 if a run failed.

    Args:
        tables: names of files in recipes/tables, such as gare-1.
        only: names of the runs to make, separated by commas, as RUN or TABLE/RUN; all by default.
        seeds: seeds separated by commas, such as 0,1,2; each recipe's own by default.
        dry_run: only show the plan.
        out: folder for run cards, runs, tables, and synthetic datasets.
        recipes: folder of the recipes; this project's own if the folder does not exist.
        fixture: use the synthetic datasets even if $TVR_DATA is set.
        fixture_videos: number of videos in each synthetic dataset.
        overlay: recipe that overrides the recipes of every run, but not the table's own values; the tables mention it.
        share: resource that the synthetic runs share: nothing; encoder, which is trained once and starts every run; or
            features, which are that encoder's stored features (only heads are trained, and runs with other backbones
            are omitted).
        engine: local for one run after another on this machine, or slurm for jobs submitted with submitit.
        partition: SLURM partition.
        minutes: time limit of a SLURM job in minutes; 1440 by default.
        gpus: number of GPUs of a SLURM job, equal to the recipe's devices; 1 by default.
        memory_gib: memory of a SLURM job in GiB; 64 by default.
        max_parallel_jobs: maximum number of SLURM jobs in the queue; 16 by default.
    """
    recipes = recipes_folder(recipes)
    asked = {
        "partition": partition,
        "minutes": minutes,
        "gpus": gpus,
        "memory_gib": memory_gib,
        "max_parallel_jobs": max_parallel_jobs,
    }
    slurm = _slurm_options(engine, asked)
    plan = make_plan(
        [load_table(name, recipes) for name in dict.fromkeys(tables)],
        _setting(out, recipes, fixture, fixture_videos, overlay, _numbers(seeds), share),
        _names(only),
    )
    folders = Folders(out)
    console = Console(highlight=False, soft_wrap=True)
    cards = read_cards(folders.cards)
    for line in plan_lines(plan, cards):
        console.print(line, markup=False)
    if dry_run:
        return 0
    starts: Engine | None = SlurmEngine(slurm, (out / "slurm").absolute()) if slurm is not None else None

    def log(line: str) -> None:
        console.print(line, markup=False)
        sys.stdout.flush()  # into a log, too, as it happens

    with _far(console) as far:
        cards = run_plan(plan, folders, log, starts, far)
    runs = [run_of_card(card, folders.cards) for card in cards.values()]
    for table in plan.tables:
        for path in write_tables([view_table(table, runs)], folders.tables / table.name):
            console.print(f"Wrote {path}", markup=False)
    return 1 if any(card.status == "failed" for card in cards.values()) else 0


@contextmanager
def _far(console: Console) -> Iterator[Callable[[str], None]]:
    """Show how far the runs are: in the last line of a terminal, elsewhere every ten seconds in a line of its own."""
    if not console.is_terminal:
        last = time.monotonic()

        def say(line: str) -> None:
            nonlocal last
            if time.monotonic() - last >= SECONDS:
                last = time.monotonic()
                print(line, flush=True)

        yield say
        return
    with ExitStack() as stack:
        status = None

        def show(line: str) -> None:
            nonlocal status
            if status is None:  # not before: what writes synthetic videos has a bar of its own
                status = stack.enter_context(console.status(line))
            status.update(escape(line))

        yield show


def plan_lines(plan: Plan, cards: dict[str, Card]) -> list[str]:
    """Return the plan as lines: every run, whether it is done, and an estimate from finished runs.

    Args:
        plan: the runs.
        cards: by key.
    """
    lines = [NOT_COMPARABLE] if plan.setting.fixture_videos is not None else []
    for run in plan.runs.values():
        seconds = estimate(run, cards)
        state = state_of(run, cards)
        about = f", about {duration(seconds)}" if state != "finished" and seconds is not None else ""
        seed = "" if run.seed is None else f", seed {run.seed}"
        also = f" (also {', '.join(run.claims[1:])})" if len(run.claims) > 1 else ""
        lines.append(
            f"{state:8s} {run.verb:7s} {run.claims[0] if run.claims else run.name}{also} on {run.dataset}{seed}{about}"
        )
    return [*lines, time_left(open_runs(plan, cards), cards)]


def _setting(
    out: Path,
    recipes: Path,
    fixture: bool,
    fixture_videos: int,
    overlay: Path | None,
    seeds: tuple[int, ...],
    share: Share,
) -> Setting:
    root = os.environ.get("TVR_DATA")
    overlay = None if overlay is None else find_recipe(overlay, "--overlay")
    if root and not fixture:
        return Setting(recipes, Path(root).expanduser(), None, overlay, seeds, share)
    if fixture_videos < LEAST_VIDEOS:
        raise TableError(f"--fixture_videos is {fixture_videos}; it must be at least {LEAST_VIDEOS}")
    return Setting(recipes, (out / f"fixture-{fixture_videos}").absolute(), fixture_videos, overlay, seeds, share)


def _names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def _numbers(words: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(word) for word in _names(words)))
    except ValueError as error:
        raise TableError(f"--seeds {words!r} must be whole numbers separated by commas, such as 0,1,2") from error


def _slurm_options(engine: EngineName, asked: dict[str, Any]) -> SlurmOptions | None:
    given = {name: value for name, value in asked.items() if value is not None}
    if engine == "slurm":
        return SlurmOptions(**given)
    if given:
        raise EngineError(
            f"{', '.join(f'--{name}' for name in given)} can only be used for SLURM jobs. Add --engine slurm."
        )
    return None
