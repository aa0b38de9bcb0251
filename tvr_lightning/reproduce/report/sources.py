"""Runs that a report shows: cards of `tvr reproduce`, or folders of `tvr fit` and `tvr evaluate`.

Also their measured values, with intervals and comparisons from the stored ranks.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import NormalDist, mean, stdev
from typing import Any

import pandas as pd
import pyarrow
import torch
from torch import Tensor

from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.evaluation import intervals
from tvr_lightning.evaluation.intervals import SUMS, QueryKind, QueryValues, metric_interval, summed_recalls
from tvr_lightning.evaluation.statistics import Comparison, Interval, paired_comparison
from tvr_lightning.ranks import Ranks
from tvr_lightning.reproduce.runs.card import Card, CardDirection, read_cards
from tvr_lightning.reproduce.runs.plan import digest
from tvr_lightning.runs.closing import RANKS
from tvr_lightning.runs.folder import METRICS

RESAMPLES = 10_000
OMITS_RANKS = "and the report omits intervals and figures"


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


@contextmanager
def undamaged(file: Path, then: str) -> Iterator[None]:
    """Raise a UserError with what to do if the content of a run's file cannot be read."""
    try:
        yield
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"{file} is damaged ({reason}). Delete it, {then}.") from error


@lru_cache(maxsize=256)
def read_ranks(run: ReportedRun, kind: QueryKind) -> tuple[Ranks, Tensor]:
    """Return the ranks of one kind of query by increasing index, and the (Q,) int64 video of each query."""
    if not run.ranks.is_file():
        raise MissingAssetError(f"figures need ranks, but there is no file {run.ranks}")
    with undamaged(run.ranks, OMITS_RANKS):
        return intervals.read_ranks(run.ranks, kind)


def read_curves(run: ReportedRun) -> dict[str, pd.Series]:
    """Return each logged metric of a run over the optimizer steps; empty if it did not train or its log is missing."""
    if run.log is None or not run.log.is_file():
        return {}
    with undamaged(run.log, "and the report omits the curves"):
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
    with undamaged(file, "or test the checkpoint again"):
        results = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(results, dict) or not {"config", "dataset", "environment"} <= set(results):
        return None
    name = str(folder.relative_to(directory)) if folder != directory else directory.absolute().name
    ranks, log = folder / RANKS, folder / METRICS
    queries: object = name
    if ranks.is_file():
        with undamaged(ranks, OMITS_RANKS):
            queries = pd.read_parquet(ranks, columns=["query", "video"]).to_numpy().tolist()
    planned: dict[str, Any] = {
        "claims": [], "seed": None, "dataset": results["dataset"], "fixture_videos": None, "overlay": None,
        "fingerprints": {"data": digest(queries)}, "configs": [],
    }  # fmt: skip
    key = re.sub(r"[^\w.-]", "-", name)
    card = Card(key, name, "finished", planned, results=results, checkpoint=results["checkpoint"])
    return ReportedRun(card, ranks, log if log.is_file() else None, results["environment"]["command"])


@dataclass(frozen=True)
class Measured:
    """A metric over the seeds of a run: the interval over queries is None if no ranks are stored."""

    mean: float
    deviation: float | None
    interval: Interval | None
    seeds: int

    def __str__(self) -> str:
        """Return the value as tables show it."""
        deviation = "" if self.deviation is None else f" ± {self.deviation:.1f}"
        interval = "" if self.interval is None else f" [{self.interval.low:.1f}, {self.interval.high:.1f}]"
        return f"{self.mean:.1f}{deviation}{interval}"

    def cell(self) -> dict[str, Any]:
        """Return the columns of the value in a table."""
        low, high = (self.interval.low, self.interval.high) if self.interval else (math.nan, math.nan)
        return {"measured": self.mean, "low": low, "high": high, "deviation": self.deviation, "seeds": self.seeds,
                "text": str(self)}  # fmt: skip


def measure(runs: Sequence[ReportedRun], direction: CardDirection, metric: str) -> Measured | None:
    """Return R@K, RSum, SumR (of both directions), MnR, MdR, or accuracy over the seeds of a run, or None."""
    runs = [run for run in runs if not math.isnan(run.value(direction, metric))]
    if not runs:
        return None
    values = [run.value(direction, metric) for run in runs]
    queries = _query_values(runs, direction, metric)
    interval = metric_interval(queries, metric) if queries else None
    return Measured(mean(values), stdev(values) if len(values) > 1 else None, interval, len(values))


def compare_runs(
    first: Sequence[ReportedRun], second: Sequence[ReportedRun], direction: CardDirection, metric: str
) -> Comparison | None:
    """Compare two runs on the same queries, second minus first, each over its seeds.

    None if their queries differ, or for MdR, which is not a mean of values per query.
    """
    runs = [*first, *second]
    if metric == "MdR" or any(math.isnan(run.value(direction, metric)) for run in runs):
        return None
    if (queries := _query_values(runs, direction, metric)) is None:
        return None
    values = torch.stack([own.scale * own.values * own.weight for own in queries])
    difference = values[len(first) :].mean(0) - values[: len(first)].mean(0)
    return paired_comparison(difference, queries[0].video, resamples=RESAMPLES)


def _query_values(runs: Sequence[ReportedRun], direction: CardDirection, metric: str) -> list[QueryValues] | None:
    """Return the values per query of each run; None if one has no ranks, other queries, or sums of other recalls."""
    if len({run.data for run in runs}) > 1 or not all(run.ranks.is_file() for run in runs):
        return None
    columns = runs[0].card.metrics(direction)
    if metric in SUMS and len({tuple(summed_recalls(run.card.metrics(direction))) for run in runs}) > 1:
        return None
    found = [QueryValues.of(partial(read_ranks, run), direction, metric, columns) for run in runs]
    return found if all(torch.equal(own.index, found[0].index) for own in found) else None


def smallest_difference(recall: float, queries: float) -> float:
    """Return the smallest difference, in points, of two recalls that a test set resolves (Agresti and Caffo, 2000).

    z sqrt(2 p (1 - p) / (Q + 2)) of independent failures, where p counts one more success and failure.
    """
    share = (recall / 100 * queries + 1) / (queries + 2)
    return 100 * NormalDist().inv_cdf(0.975) * math.sqrt(2 * share * (1 - share) / (queries + 2))
