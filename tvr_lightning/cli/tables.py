"""Commands about published tables; their signatures and docstrings are the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tvr_lightning.cli.loading import loading
from tvr_lightning.cli.types import AtLeast2, AtLeast8, Folder, NewFolder, Runs
from tvr_lightning.config.recipe_files import OptionError, refuse_options, split_options
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Count, NotNegative, Workers

BATCH, APPLIED = "data.init_args.batch_size", ("trainer.precision", "trainer.plugins")


def published(
    paper: str | None = None,
    table: str | None = None,
    dataset: str | None = None,
    method: str | None = None,
    direction: Literal["t2v", "v2t", "t2v+v2t"] | None = None,
    format: Literal["table", "csv", "json"] = "table",
) -> int:
    """Print the results that the papers publish; a dash marks unpublished values.

    Args:
        paper: name of the paper: gare, tc-mgc, ncl, dpdv, gaid, or zero-shot for pretrained encoders; all by default.
        table: number of the table in the paper, such as 1, 7a, S3 or Fig7.
        dataset: name of the dataset, such as MSR-VTT.
        method: part of the method's name, regardless of case, such as GARE.
        direction: retrieval direction: t2v, v2t, or t2v+v2t for sums over both.
        format: output format: a table for reading, or CSV or JSON for other tools.
    """
    from tvr_lightning.reproduce.published import select_published
    from tvr_lightning.reproduce.published_table import print_published

    print_published(select_published(paper, table, dataset, method, direction), format)
    return 0


def reproduce(
    tables: list[str],
    /,
    only: str = "",
    seeds: str = "",
    dry_run: bool = False,
    out: NewFolder = Path("runs/reproduced"),
    recipes: Path = Path("recipes"),
    fixture: bool = False,
    fixture_videos: AtLeast8 | None = None,
    overlay: Path | None = None,
    share: Literal["nothing", "encoder", "features"] = "nothing",
    engine: Literal["local", "slurm"] = "local",
    partition: str | None = None,
    minutes: Count | None = None,
    gpus: Workers | None = None,
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
    from tvr_lightning.config.recipe_files import find_recipe, recipes_folder
    from tvr_lightning.reproduce.runs.plan import Setting, make_plan
    from tvr_lightning.reproduce.tables import load_table

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
    named = [load_table(name, recipes) for name in dict.fromkeys(tables)]
    plan = make_plan(named, setting, _names(only))
    with loading("reproduce"):
        from tvr_lightning.reproduce.report.sources import run_of_card
        from tvr_lightning.reproduce.report.table_view import NOT_COMPARABLE, view_table, write_tables
        from tvr_lightning.reproduce.runs.card import read_cards
        from tvr_lightning.reproduce.runs.engines import SlurmEngine
        from tvr_lightning.reproduce.runs.runner import plan_lines, run_plan

    if videos is not None:
        print(NOT_COMPARABLE)
    print("\n".join(plan_lines(plan, read_cards(out / "cards"))), flush=True)
    if dry_run:
        return 0
    given = {name: value for name, value in slurm.items() if value is not None}
    jobs = SlurmEngine((out / "slurm").absolute(), **given) if engine == "slurm" else None  # type: ignore[arg-type]
    cards = run_plan(plan, out, lambda line: print(line, flush=True), jobs)
    runs = [run_of_card(card, out / "cards") for card in cards.values()]
    for table in named:
        for path in write_tables([view_table(table, runs)], out / "tables" / table.name):
            print(f"Wrote {path}")
    return 1 if any(card.status == "failed" for card in cards.values()) else 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def report(directory: Runs, /, recipes: Path = Path("recipes"), tables_only: bool = False) -> int:
    """Write the results of `tvr reproduce` or `tvr fit` to a folder of pages, report/index.html first.

    The figures are drawn from each run's own weights and test split: one pass, stored in figures/.

    Args:
        directory: folder that `tvr reproduce --out` wrote, or a folder of runs of `tvr fit`.
        recipes: folder of the recipes, whose tables map runs to published rows.
        tables_only: omit the figures that need weights and videos.
    """
    with loading("report"):
        from tvr_lightning.config.recipe_files import recipes_folder
        from tvr_lightning.reproduce.report.write import write_report

    for path in write_report(directory, recipes_folder(recipes), tables_only):
        print(f"Wrote {path}")
    return 0


def verify_released(checkpoints: Folder, /, tolerance: NotNegative = 0.3, num_workers: Workers = 2) -> int:
    """Evaluate the authors' released checkpoints on $TVR_DATA; the exit status is 1 if a result is not as published.

    Args:
        checkpoints: folder with the authors' files, named by method: xpool.pth, gare.bin, ...
        tolerance: maximum difference from the published R@1, in percentage points.
        num_workers: number of processes that decode.
    """
    if not os.environ.get("TVR_DATA"):
        raise UserError("The papers' test videos are required. Set TVR_DATA to their parent folder.")
    with loading("verify-released"):
        from tvr_lightning.reproduce.released import verify

    return verify(checkpoints, tolerance, num_workers)


def profile(
    config: list[str],
    out: NewFolder = Path("runs/reproduced"),
    batch_size: AtLeast2 = 16,
    queries: Count = 1000,
    repeats: Count = 3,
    device: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Measure the parameters, memory, and time of a method on random inputs of the recipe's sizes.

    Neither a dataset nor trained weights are needed.

    Milliseconds per video: encoding one video (its share of a batch, media in memory) and scoring all queries against
    it. Times and memory are those of the recipe's precision and gradient cache.

    Args:
        config: recipe files, can be repeated; later ones override earlier ones.
        out: parent folder of profiles/; by default that of `tvr reproduce`, whose report then shows the profiles.
        batch_size: number of matching pairs per batch.
        queries: number of texts that each video is scored against.
        repeats: number of time measurements, of which the median is reported.
        device: device to measure on; a GPU by default if available.
        overrides: options that override those of recipes.
    """
    given = [option for option, _ in split_options(overrides)]
    ignored = [name for name in given if name == BATCH or (name.startswith("trainer.") and name not in APPLIED)]
    refuse_options(dict.fromkeys(ignored, True), "cannot be used in a profile, which has --batch_size and --device.")
    with loading("profile"):
        from tvr_lightning.config.recipe import Recipe
        from tvr_lightning.reproduce.profile.profile import profile as measure
        from tvr_lightning.reproduce.runs.card import write_record

    card = measure(Recipe.parse(config, overrides), batch_size, queries, repeats, device)
    print(f"Wrote {write_record(card, out / 'profiles' / f'{card.name}.json')}")
    return 0
