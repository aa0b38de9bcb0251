"""The curves of a run as a table that anything reads, beside whatever logger it has."""

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
    """Writes what is logged to `metrics.csv`: one row per value, in the order in which they come.

    A run that goes on drops the rows of steps that it takes again.

    Args:
        folder: of the run; made with the first value.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.file = folder / FILE
        self._epoch = 0.0
        self._begun = False

    @property
    def name(self) -> str:
        """What Lightning calls it."""
        return "curves"

    @property
    def version(self) -> str:
        """There is one file per run."""
        return ""

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        """Nothing: config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append values.

        Args:
            metrics: by name; `epoch` is the epoch of the others.
            step: of the optimiser.
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
                    except (TypeError, ValueError):  # the line that a kill cut short
                        break
                    if not earlier:
                        break
                    kept.append((row["epoch"], row["step"], row["name"], value))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("w", newline="", encoding="utf-8") as target:
            csv.writer(target).writerows([COLUMNS, *kept])
        self._begun = True
