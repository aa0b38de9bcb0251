"""Runs that a report shows: cards of `tvr reproduce`, or folders of `tvr fit` and `tvr evaluate`."""

import json
import math
import re
import shlex
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation import rank_table
from tvr_lightning.evaluation.rank_table import QueryKind
from tvr_lightning.ranks import Ranks
from tvr_lightning.reproduce.runs.card import Card, CardDirection, read_cards
from tvr_lightning.reproduce.runs.plan import digest
from tvr_lightning.runs.closing import RANKS
from tvr_lightning.runs.folder import METRICS


@dataclass(eq=False)
class ReportedRun:
    """One run: its card, made from results.json for a folder of `tvr fit`, and its files."""

    card: Card
    ranks: Path  # parquet file
    log: Path | None  # metrics that were logged in training
    command: str  # that repeats the run

    def __post_init__(self) -> None:
        self.key = self.card.key
        self.planned = self.card.run
        self.results: dict[str, Any] = self.card.results or {}
        self.finished = self.card.status == "finished"
        self.external = self.results.get("weights", {}).get("kind") == "outside"
        self.claims: list[str] = self.planned["claims"]
        self.seed: int | None = self.planned["seed"]
        self.title = self.card.name if self.seed is None else f"{self.card.name}, seed {self.seed}"
        self.dataset = str(self.results.get("dataset", self.planned["dataset"]))
        self.data = str(self.planned["fingerprints"]["data"])
        self.fingerprint = digest(self.card.results, self.card.checkpoint)

    def value(self, direction: CardDirection, metric: str) -> float:
        """Return a metric, NaN if the run does not have it. SumR belongs to both directions."""
        if (accuracy := self.card.accuracy()) is not None:
            return accuracy if metric == "accuracy" else math.nan
        if metric == "SumR":
            return float(self.results.get("sum_of_recalls", math.nan))
        return self.card.metrics(direction).get(metric, math.nan)

    def settings(self) -> dict[str, str]:
        """Return the options of model, data, and trainer, and the seed, by dotted name, without their folders."""
        config = {name: self.results["config"].get(name) for name in ("seed_everything", "model", "data", "trainer")}
        folders = ("encoder.init_args.trained_in", "data.init_args.root", "data.init_args.features")
        flat = pd.json_normalize(config).iloc[0].items()
        return {str(name): str(value) for name, value in flat if not str(name).endswith(folders)}


@lru_cache(maxsize=256)
def read_ranks(run: ReportedRun, kind: QueryKind) -> tuple[Ranks, Tensor]:
    """Return the ranks of one kind of query by increasing index, and the (Q,) int64 video of each query."""
    return rank_table.read_ranks(run.ranks, kind)


def read_curves(run: ReportedRun) -> dict[str, pd.Series]:
    """Return each logged metric of a run over the optimizer steps; empty if it did not train or its log is missing."""
    if run.log is None or not run.log.is_file():
        return {}
    steps = pd.read_csv(run.log).groupby("step").last()  # of each metric
    return {str(name): values.dropna() for name, values in steps.items() if name != "epoch"}


def run_of_card(card: Card, folder: Path) -> ReportedRun:
    """Return the run of a card in a folder of cards, with the `tvr reproduce` command that makes it."""
    run = card.run
    table, _, name = (run["claims"] or [card.name])[0].partition("/")
    words = ["tvr", "reproduce", table, "--only", name]
    if run["seed"] is not None:
        words += ["--seeds", str(run["seed"])]
    if run["fixture_videos"] is not None:
        words += ["--fixture", "--fixture_videos", str(run["fixture_videos"])]
    if run["share"] != "nothing":
        words += ["--share", run["share"]]
    if run["overlay"] is not None:
        words += ["--overlay", run["overlay"]]
    log = Path(card.checkpoint).parent.parent / METRICS if card.checkpoint and run["verb"] == "fit" else None
    return ReportedRun(card, folder / f"{card.key}.parquet", log, shlex.join(words))


def read_runs(directory: Path) -> list[ReportedRun]:
    """Read the cards of `tvr reproduce`, or else all results of `tvr fit` and `tvr evaluate` in a folder."""
    folder = directory / "cards"
    runs = [run_of_card(card, folder) for card in read_cards(folder).values()]
    runs = runs or [run for file in sorted(directory.rglob("results.json")) if (run := run_of_results(file, directory))]
    if not runs:
        raise UserError(
            f"{directory} contains no run cards and no results.json. Create runs with `tvr reproduce TABLE --out "
            f"{directory}` or with `tvr fit --results.directory {directory}`."
        )
    claimed: dict[tuple[str, int | None], ReportedRun] = {}
    for place, run in enumerate(runs):
        if run.key in {other.key for other in runs[:place]}:  # as of the folders a/b and a-b
            run.key = f"{run.key}-{place}"
        for claim in run.claims:
            if (other := claimed.setdefault((claim, run.seed), run)) is not run:
                raise UserError(
                    f"{folder / other.key}.json and {folder / run.key}.json are both cards of the run "
                    f"{claim} with seed {run.seed}. Delete the one with older code or other settings."
                )
    return sorted(runs, key=lambda run: (run.card.name, run.seed or 0))


def run_of_results(file: Path, directory: Path) -> ReportedRun | None:
    """Return the run of a results.json in a folder of runs; None if the file is not from a run."""
    folder = file.parent
    results = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(results, dict) or not {"config", "dataset", "environment"} <= set(results):
        return None
    name = str(folder.relative_to(directory)) if folder != directory else directory.absolute().name
    ranks, log = folder / RANKS, folder / METRICS
    queries = pd.read_parquet(ranks, columns=["query", "video"]).to_numpy().tolist() if ranks.is_file() else name
    planned: dict[str, Any] = {
        "claims": [], "seed": None, "dataset": results["dataset"], "fixture_videos": None, "overlay": None,
        "fingerprints": {"data": digest(queries)}, "configs": [],
    }  # fmt: skip
    key = re.sub(r"[^\w.-]", "-", name)
    card = Card(key, name, "finished", planned, results=results, checkpoint=results["checkpoint"])
    return ReportedRun(card, ranks, log if log.is_file() else None, results["environment"]["command"])
