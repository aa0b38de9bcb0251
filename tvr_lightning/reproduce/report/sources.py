"""Input of a report: runs as cards of `tvr reproduce` or folders of `tvr fit`, profiles, and recipes of tables.

The report imports from `runs`, `profile`, and `tables` only here.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.reproduce.profile.card import ProfileCard, read_profiles
from tvr_lightning.reproduce.profile.costs import STAGES
from tvr_lightning.reproduce.runs.card import Card, CardDirection, QueryKind, card_path, ranks_path, read_cards
from tvr_lightning.reproduce.runs.card import read_ranks as read_ranks_of_card
from tvr_lightning.reproduce.runs.commands import command_of
from tvr_lightning.reproduce.runs.fingerprint import digest
from tvr_lightning.reproduce.tables import TableRecipe, known_tables, load_table
from tvr_lightning.runs.metrics_file import FILE as METRICS
from tvr_lightning.runs.page import RANKS

__all__ = [
    "STAGES", "Card", "CardDirection", "ProfileCard", "QueryKind", "ReportedRun", "TableRecipe", "known_tables",
    "load_table", "read_profiles", "read_ranks", "read_runs", "run_of_card",
]  # fmt: skip


@dataclass(eq=False)
class ReportedRun:
    """One run.

    Attributes:
        card: Its card. For a folder of `tvr fit`, a card made from results.json.
        file: Parquet file with the ranks of its queries.
        log: Table of the metrics logged in training, or None if the run did not train.
        command: Command that repeats the run.
    """

    card: Card
    file: Path
    log: Path | None
    command: str

    def __post_init__(self) -> None:
        self.key, self.title, self.planned = self.card.key, self.card.words, self.card.run
        self.results: dict[str, Any] = self.card.results or {}
        self.finished = self.card.status == "finished"
        self.claims: list[str] = self.planned["claims"]
        self.seed: int | None = self.planned["seed"]
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


@lru_cache(maxsize=256)
def read_ranks(run: ReportedRun, kind: QueryKind) -> tuple[Ranks, Tensor]:
    """Return the ranks of one kind of query by increasing index, and the (Q,) int64 video of each query."""
    if run.file.name != RANKS:
        return read_ranks_of_card(run.key, run.file.parent, kind)
    frame = pd.read_parquet(run.file)
    frame = frame[frame["direction"] == kind.replace("_", "-")]
    rank = frame["rank"].to_numpy() - 1
    # The file of `tvr fit` has only expected ranks: a half rank is read as a tie of two items.
    better, tied = np.floor(rank).astype(np.int64), 1 + (rank % 1 > 0).astype(np.int64)
    video = torch.tensor(pd.factorize(frame["video"], sort=True)[0])
    return Ranks(torch.tensor(better), torch.tensor(tied), torch.arange(len(frame))), video


def run_of_card(card: Card, folder: Path) -> ReportedRun:
    """Return the run of a card in a folder of cards."""
    trained = card.checkpoint is not None and card.run["verb"] == "fit"
    log = Path(str(card.checkpoint)).parent.parent / METRICS if trained else None
    return ReportedRun(card, ranks_path(card_path(folder, card.key)), log, command_of(card))


def read_runs(directory: Path) -> list[ReportedRun]:
    """Read the cards of `tvr reproduce`, or else the results of all runs of `tvr fit` in a folder.

    Raises:
        UserError: The folder contains no runs, a card cannot be used, or two cards stand for the same row and seed.
    """
    folder = directory / "cards"
    runs = [run_of_card(card, folder) for card in read_cards(folder).values()]
    runs = runs or [run for file in sorted(directory.rglob("results.json")) if (run := _fitted(file, directory))]
    if not runs:
        raise UserError(
            f"{directory} contains no run cards and no results.json. Create runs with `tvr reproduce TABLE --out "
            f"{directory}` or with `tvr fit --results.directory {directory}`."
        )
    claimed: dict[tuple[str, int | None], ReportedRun] = {}
    for run in runs:
        for claim in run.claims:
            if (other := claimed.setdefault((claim, run.seed), run)) is not run:
                raise UserError(
                    f"{card_path(folder, other.key)} and {card_path(folder, run.key)} are both cards of the run "
                    f"{claim} with seed {run.seed}. Delete the one with older code or other settings."
                )
    return sorted(runs, key=lambda run: (run.card.name, run.seed or 0))


def _fitted(file: Path, directory: Path) -> ReportedRun | None:
    """Return the run of a results.json; None if the file is not from a run."""
    folder, results = file.parent, json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(results, dict) or not {"config", "dataset", "environment"} <= set(results):
        return None
    name = str(folder.relative_to(directory)) if folder != directory else directory.absolute().name
    ranks, log = folder / RANKS, folder / METRICS
    queries = pd.read_parquet(ranks, columns=["query", "video"]).to_numpy().tolist() if ranks.is_file() else name
    planned: dict[str, Any] = {
        "claims": [], "seed": None, "dataset": results["dataset"], "fixture_videos": None, "overlay": None,
        "fingerprints": {"data": digest(queries)}, "configs": [],
    }  # fmt: skip
    card = Card(
        re.sub(r"[^\w.-]", "-", name), name, "finished", planned, results=results, checkpoint=results["checkpoint"]
    )
    return ReportedRun(card, ranks, log if log.is_file() else None, results["environment"]["command"])
