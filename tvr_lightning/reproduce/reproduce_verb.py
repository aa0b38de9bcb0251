"""`tvr reproduce`: published tables run again, with the results next to the published ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from tvr_lightning.config.recipe_files import OptionError, find_recipe, recipes_folder, refuse_options
from tvr_lightning.places import NewFolder
from tvr_lightning.progress import clock
from tvr_lightning.ranges import Count, Range
from tvr_lightning.reproduce.report.sources import run_of_card
from tvr_lightning.reproduce.report.table_view import NOT_COMPARABLE, view_table, write_tables
from tvr_lightning.reproduce.runs.card import Card, read_cards
from tvr_lightning.reproduce.runs.engines import SlurmEngine
from tvr_lightning.reproduce.runs.plan import Plan, Setting, Share, make_plan
from tvr_lightning.reproduce.runs.runner import Folders, expected_seconds, open_runs, run_plan, time_left
from tvr_lightning.reproduce.tables import load_table
from tvr_lightning.synthetic.generate import LEAST_VIDEOS


def run_reproduce(
    tables: list[str],
    only: str = "",
    seeds: str = "",
    dry_run: bool = False,
    out: NewFolder = Path("runs/reproduced"),
    recipes: Path = Path("recipes"),
    fixture: bool = False,
    fixture_videos: Annotated[int, Range(at_least=LEAST_VIDEOS)] | None = None,
    overlay: Path | None = None,
    share: Share = "nothing",
    engine: Literal["local", "slurm"] = "local",
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
        fixture_videos: number of videos in each synthetic dataset; 500 by default.
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
    slurm = {"partition": partition, "minutes": minutes, "gpus": gpus, "memory_gib": memory_gib,
             "max_parallel_jobs": max_parallel_jobs}  # fmt: skip
    if engine == "local":
        refuse_options(slurm, "can only be used for SLURM jobs. Add --engine slurm.")
    recipes, root = recipes_folder(recipes), os.environ.get("TVR_DATA")
    if root and not fixture:
        refuse_options({"fixture_videos": fixture_videos}, "can only be used for synthetic datasets. Add --fixture.")
        folder, videos = Path(root).expanduser(), None
    else:
        videos = fixture_videos or 500
        folder = (out / f"fixture-{videos}").absolute()
    try:
        chosen = tuple(dict.fromkeys(int(seed) for seed in _names(seeds)))
    except ValueError as error:
        raise OptionError(f"--seeds {seeds!r} must be whole numbers separated by commas, such as 0,1,2") from error
    laid_over = None if overlay is None else find_recipe(overlay, "--overlay")
    setting = Setting(recipes, folder, videos, laid_over, chosen, share)
    plan = make_plan([load_table(name, recipes) for name in dict.fromkeys(tables)], setting, _names(only))
    folders = Folders(out)
    print("\n".join(plan_lines(plan, read_cards(folders.cards))), flush=True)
    if dry_run:
        return 0
    given = {name: value for name, value in slurm.items() if value is not None}
    jobs = SlurmEngine((out / "slurm").absolute(), **given) if engine == "slurm" else None  # type: ignore[arg-type]
    cards = run_plan(plan, folders, lambda line: print(line, flush=True), jobs)
    runs = [run_of_card(card, folders.cards) for card in cards.values()]
    for table in plan.tables:
        for path in write_tables([view_table(table, runs)], folders.tables / table.name):
            print(f"Wrote {path}")
    return 1 if any(card.status == "failed" for card in cards.values()) else 0


def plan_lines(plan: Plan, cards: dict[str, Card]) -> list[str]:
    """Return a line for every run with its state and expected duration, and one for all of them."""
    lines = [NOT_COMPARABLE] if plan.setting.fixture_videos is not None else []
    for run in plan.runs.values():
        state, seconds = cards[run.key].status if run.key in cards else "open", expected_seconds(run, cards)
        about = f", about {clock(seconds)}" if state != "finished" and seconds is not None else ""
        seed = "" if run.seed is None else f", seed {run.seed}"
        name, *others = run.claims or [run.name]
        also = f" (also {', '.join(others)})" if others else ""
        lines.append(f"{state:8s} {run.verb:7s} {name}{also} on {run.dataset}{seed}{about}")
    return [*lines, time_left(open_runs(plan, cards), cards)]


def _names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]
