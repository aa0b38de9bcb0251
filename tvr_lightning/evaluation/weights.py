"""Which weights made a table: untrained, as published, or of which run and epoch, and which split chose them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tvr_lightning.checkpoints import CONVERTED, RECORD

Kind = Literal["untrained", "zero-shot", "last", "best", "running", "converted", "outside", "unknown"]


@dataclass
class Weights:
    """What the evaluated weights are, as far as their checkpoint says it.

    Attributes:
        kind: `untrained`, a random start; `zero-shot`, published weights of the encoder and nothing trained since;
            `last`, `best` or `running`, saved by a run after its last, its best or an interrupted step; `converted`,
            the authors' own; `outside`, scores of a file and no weights at all; `unknown` where the checkpoint does not
            say.
        run: folder of the run that trained them.
        epoch: epochs begun, the one at hand included. step: optimiser steps.
        chosen_on: of best weights, the split whose scores chose the epoch.
        monitor: that score.
        start: of weights without a checkpoint, what the encoder starts from and what else is untrained; of scores from
            outside, their file.
        overridden: options of the checkpoint that change its scores and were set otherwise.
    """

    kind: Kind
    run: str | None = None
    epoch: int | None = None
    step: int | None = None
    chosen_on: Literal["val", "test"] | None = None
    monitor: str | None = None
    start: str | None = None
    overridden: list[str] = field(default_factory=list)

    @property
    def select_on(self) -> Literal["last", "val", "test"] | None:
        """Which split chose them, `last` where none did; None where nothing was trained or nobody says."""
        if self.kind in ("last", "running"):
            return "last"
        return self.chosen_on if self.kind == "best" else None

    def caption(self) -> str:
        """Return what a table says of its weights."""
        said = {
            "untrained": f"UNTRAINED weights: no checkpoint was given, and {self.start}",
            "zero-shot": f"zero-shot: no checkpoint was given, and {self.start}",
            "last": f"weights of the last step{self._saved()}",
            "best": f"weights of the best epoch{self._saved()}{self._chosen()}",
            "running": f"weights of an interrupted run{self._saved()}",
            "converted": "the authors' weights, converted; how they were selected is unknown",
            "outside": f"EXTERNAL SCORES: {self.start}; how they were computed is unknown",
            "unknown": f"unknown weights: their checkpoint does not record their origin{self._saved()}",
        }[self.kind]
        return said if self.select_on is None else f"{said} · select_on: {self.select_on}"

    def warnings(self) -> list[str]:
        """Return what a reader must know before comparing, a sentence each."""
        return [f"scored with another option than in training: {option}" for option in self.overridden]

    def _saved(self) -> str:
        where = [f"epoch {self.epoch}"] if self.epoch is not None else []
        where += [f"step {self.step}"] if self.step is not None else []
        said = f" ({', '.join(where)})" if where else ""
        return f"{said} of {self.run}" if self.run else said

    def _chosen(self) -> str:
        by = f" by {self.monitor}" if self.monitor else ""
        if self.chosen_on is None:
            return f", selected{by} on an unknown split"
        return f", selected{by} on the " + (
            "TEST split: optimistic" if self.chosen_on == "test" else "validation split"
        )


def record_of(
    run: str | None, chosen_on: str, monitor: str, precision: str, seed: int | None, trained_on: str
) -> dict[str, Any]:
    """Return what a run writes into the checkpoints it saves.

    Args:
        run: its folder.
        chosen_on: `val` or `test`, the split that its validation loop runs on.
        monitor: the score that chooses the best epoch.
        precision, seed: of the run.
        trained_on: Title of the dataset.
    """
    return {
        "run": run,
        "chosen_on": chosen_on,
        "monitor": monitor,
        "precision": precision,
        "seed": seed,
        "trained_on": trained_on,
    }


def weights_of(saved: dict[str, Any]) -> Weights:
    """Return what a checkpoint says of its weights.

    Args:
        saved: what the checkpoint holds.
    """
    if CONVERTED in saved:
        return Weights("converted")
    record = saved.get(RECORD) or {}
    saved_as: dict[Any, Kind] = {"last": "last", "best": "best", "running": "running"}
    kind = saved_as.get(record.get("file"), "unknown")
    return Weights(
        kind,
        run=record.get("run"),
        epoch=None if saved.get("epoch") is None else int(saved["epoch"]) + 1,
        step=None if saved.get("global_step") is None else int(saved["global_step"]),
        chosen_on=record.get("chosen_on") if kind == "best" else None,
        monitor=record.get("monitor") if kind == "best" else None,
    )
