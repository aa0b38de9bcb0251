"""Commands about published tables."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tvr_lightning.cli.options import Config, Device, Folder, NewFolder, Runs, Trust
from tvr_lightning.config.recipe_files import find_recipe, recipes_folder, refuse_options, split_options
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Count, NotNegative, Range, Workers
from tvr_lightning.runs.log import loading

APPLIED = ("trainer.precision", "trainer.plugins")  # options of the trainer that a profile uses


def published(
    paper: Annotated[str | None, "gare, tc-mgc, ncl, dpdv, gaid, or zero-shot for pretrained encoders"] = None,
    table: Annotated[str | None, "number of the table in the paper, such as 1, 7a, S3, or Fig7"] = None,
    dataset: Annotated[str | None, "name of the dataset, such as MSR-VTT"] = None,
    method: Annotated[str | None, "part of the method's name, regardless of case, such as GARE"] = None,
    direction: Annotated[Literal["t2v", "v2t", "t2v+v2t"] | None, "retrieval direction; t2v+v2t for sums"] = None,
    format: Annotated[Literal["table", "csv", "json"], "output format"] = "table",
) -> None:
    """Print the results that the papers publish; a dash marks unpublished values."""
    from tvr_lightning.reproduce.published import print_published, select_published

    print_published(select_published(paper, table, dataset, method, direction), format)


def reproduce(
    tables: Annotated[list[str], "name of a file in recipes/tables, such as gare-1"],
    /,
    only: Annotated[str, "names of the runs to make, separated by commas, as RUN or TABLE/RUN; all by default"] = "",
    seeds: Annotated[str, "seeds separated by commas, such as 0,1,2; each recipe's own by default"] = "",
    dry_run: Annotated[bool, "only show the plan"] = False,
    out: Annotated[NewFolder, "folder for run cards, runs, tables, and synthetic data"] = Path("runs/reproduced"),
    recipes: Annotated[Path, "folder of the recipes; this project's own if it does not exist"] = Path("recipes"),
    fixture: Annotated[bool, "use the synthetic datasets even if $TVR_DATA is set"] = False,
    fixture_videos: Annotated[int | None, Range(at_least=8), "videos per synthetic dataset; 500 by default"] = None,
    overlay: Annotated[Path | None, "recipe that overrides those of every run, but not the table's values"] = None,
    share: Annotated[Literal["nothing", "encoder", "features"], "resource that synthetic runs share"] = "nothing",
    engine: Annotated[Literal["local", "slurm"], "local, or slurm for jobs submitted with submitit"] = "local",
    partition: Annotated[str | None, "SLURM partition"] = None,
    minutes: Annotated[Count | None, "time limit of a SLURM job in minutes; 1440 by default"] = None,
    gpus: Annotated[Workers | None, "number of GPUs of a SLURM job, the recipe's devices; 1 by default"] = None,
    memory_gib: Annotated[Count | None, "memory of a SLURM job in GiB; 64 by default"] = None,
    max_parallel_jobs: Annotated[Count | None, "maximum number of queued SLURM jobs; 16 by default"] = None,
) -> int:
    """Rerun published tables and compare the results with the published ones, as markdown, CSV, and LaTeX.

    Without $TVR_DATA, every run uses the synthetic dataset in its dataset's layout. Finished runs are not repeated. The
    exit status is 1 if a run failed.

    Synthetic runs can share an encoder, which is trained once and starts every run, or that encoder's stored features:
    then only heads are trained, and runs with other backbones are omitted.
    """
    from tvr_lightning.reproduce.runs.plan import Setting, make_plan
    from tvr_lightning.reproduce.tables import load_table

    slurm = {"partition": partition, "minutes": minutes, "gpus": gpus, "memory_gib": memory_gib,
             "max_parallel_jobs": max_parallel_jobs}  # fmt: skip
    if engine == "local":
        refuse_options(slurm, "can only be used for SLURM jobs. Add --engine slurm.")
    recipes = recipes_folder(recipes)
    root = os.environ.get("TVR_DATA")
    if root and not fixture:
        refuse_options({"fixture_videos": fixture_videos}, "can only be used for synthetic datasets. Add --fixture.")
        folder = Path(root).expanduser()
        videos = None
    else:
        videos = fixture_videos or 500
        folder = (out / f"fixture-{videos}").absolute()
    try:
        chosen = tuple(dict.fromkeys(int(seed) for seed in filter(None, seeds.split(","))))
    except ValueError as error:
        raise UserError(f"--seeds {seeds!r} must be whole numbers separated by commas, such as 0,1,2") from error
    laid_over = None if overlay is None else find_recipe(overlay, "--overlay")
    setting = Setting(recipes, folder, videos, laid_over, chosen, share)
    named = [load_table(name, recipes) for name in dict.fromkeys(tables)]
    plan = make_plan(named, setting, [name.strip() for name in only.split(",") if name.strip()])
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


def report(
    directory: Annotated[Runs, "folder of `tvr reproduce`, `tvr fit`, or `tvr evaluate`"],
    /,
    recipes: Annotated[Path, "folder of the recipes, whose tables map runs to published rows"] = Path("recipes"),
    tables_only: Annotated[bool, "omit the figures that need weights and videos"] = False,
    trust: Trust = [],
) -> None:
    """Write results as a folder of pages with tables and figures, report/index.html first.

    The figures are drawn from each run's own weights and test split: one pass, stored in figures/.
    """
    with loading("report"):
        from tvr_lightning.reproduce.report.site import report_on
        from tvr_lightning.reproduce.report.sources import read_runs

    site = report_on(read_runs(directory), directory, recipes_folder(recipes), tables_only, trust)
    for path in site.write():
        print(f"Wrote {path}")


def verify_released(
    checkpoints: Annotated[Folder, "folder with the authors' files, named by method: xpool.pth, gare.bin, ..."],
    /,
    tolerance: Annotated[NotNegative, "maximum difference from the published R@1, in percentage points"] = 0.3,
    num_workers: Annotated[Workers, "number of processes that decode"] = 2,
) -> int:
    """Evaluate the authors' released checkpoints and compare the results with the published ones.

    The videos are those in $TVR_DATA. The exit status is 1 if a result is not as published.
    """
    if not os.environ.get("TVR_DATA"):
        raise UserError("The papers' test videos are required. Set TVR_DATA to their parent folder.")
    with loading("verify-released"):
        from tvr_lightning.reproduce.released import verify

    return verify(checkpoints, tolerance, num_workers)


def profile(
    config: Config,
    out: Annotated[NewFolder, "parent folder of profiles/, which `tvr report` shows"] = Path("runs/reproduced"),
    batch_size: Annotated[int, Range(at_least=2), "number of matching pairs per batch"] = 16,
    queries: Annotated[Count, "number of texts that each video is scored against"] = 1000,
    repeats: Annotated[Count, "number of time measurements, of which the median is reported"] = 3,
    device: Device = None,
    overrides: Sequence[str] = (),
) -> None:
    """Measure the parameters, memory, and time of a method on random inputs of the recipe's sizes.

    Neither a dataset nor trained weights are needed.

    Milliseconds per video: encoding one video (its share of a batch, media in memory) and scoring all queries against
    it. Times and memory are those of the recipe's precision and gradient cache.
    """
    given = [option for option, _ in split_options(overrides) if option not in APPLIED]
    ignored = [name for name in given if name == "data.init_args.batch_size" or name.startswith("trainer.")]
    refuse_options(dict.fromkeys(ignored, True), "cannot be used in a profile, which has --batch_size and --device.")
    with loading("profile"):
        from tvr_lightning.config.recipe import Recipe
        from tvr_lightning.reproduce.profile.costs import profile as measure
        from tvr_lightning.reproduce.runs.card import write_record

    card = measure(Recipe.parse(config, overrides), batch_size, queries, repeats, device)
    print(f"Wrote {write_record(card, out / 'profiles' / f'{card.name}.json')}")
