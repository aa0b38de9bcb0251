"""Logged values of a run as a CSV table, in addition to any other logger."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

FILE = "metrics.csv"
COLUMNS = ("epoch", "step", "name", "value")


class CurvesLogger(Logger):
    """Logger that writes to `metrics.csv`, one row per value in the order of logging.

    A resumed run removes the rows of the steps that it repeats.

    Args:
        folder: folder of the run, created with the first value.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.file = folder / FILE
        self._epoch = 0.0
        self._begun = False

    @property
    def name(self) -> str:
        """Return the name of the logger."""
        return "curves"

    @property
    def version(self) -> str:
        """Return an empty version, because there is one file per run."""
        return ""

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        """Ignore the hyperparameters, which are in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append values to the table.

        Args:
            metrics: Values by name; `epoch` is the epoch of the other values.
            step: Optimizer step.
        """
        self._epoch = metrics.get("epoch", self._epoch)
        rows = [(int(self._epoch), step, name, float(value)) for name, value in metrics.items() if name != "epoch"]
        if not rows:
            return
        if not self._begun:
            self._begin(step)
        with self.file.open("a", newline="", encoding="utf-8") as target:
            csv.writer(target).writerows(rows)

    def _begin(self, step: int | None) -> None:
        kept = []
        if self.file.is_file():
            with self.file.open(newline="", encoding="utf-8") as source:
                for row in csv.DictReader(source):
                    try:
                        earlier = int(row["step"]) < (math.inf if step is None else step)
                        value = float(row["value"])
                    except (TypeError, ValueError):  # incomplete line of an interrupted run
                        break
                    if not earlier:
                        break
                    kept.append((row["epoch"], row["step"], row["name"], value))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("w", newline="", encoding="utf-8") as target:
            csv.writer(target).writerows([COLUMNS, *kept])
        self._begun = True
