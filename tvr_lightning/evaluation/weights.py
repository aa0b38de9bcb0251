"""Origin of the evaluated weights: untrained, published, or trained, with run, epoch and selection split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tvr_lightning.training.checkpoints import CONVERTED, RECORD

Kind = Literal["untrained", "zero-shot", "last", "best", "running", "converted", "outside", "unknown"]


@dataclass
class Weights:
    """Origin of the evaluated weights, as recorded in their checkpoint.

    Attributes:
        kind: `untrained`, random initialization; `zero-shot`, published weights of the encoder without further
            training; `last`, `best` or `running`, saved by a run after its last step, its best epoch or an
            interruption; `converted`, weights of the authors; `outside`, scores from a file without weights; `unknown`
            if the checkpoint has no record.
        run: folder of the run that trained them.
        epoch: number of epochs begun, including the current one.
        step: number of optimizer steps.
        chosen_on: split whose scores selected the epoch of the best weights.
        monitor: name of the score that selected the epoch.
        start: for weights without a checkpoint, the initialization of the encoder and the untrained parts; for external
            scores, their file.
        overridden: options of the checkpoint that affect scores and were changed.
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
        """Return the split that selected the weights, `last` if none did, or None if untrained or unknown."""
        if self.kind in ("last", "running"):
            return "last"
        return self.chosen_on if self.kind == "best" else None

    def caption(self) -> str:
        """Return the description of the weights for a results table."""
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
        """Return warnings about options that were changed after training, one sentence each."""
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
    """Return the record that a run writes to its checkpoints.

    Args:
        run: Folder of the run.
        chosen_on: Split of the validation loop, `val` or `test`.
        monitor: Name of the score that selects the best epoch.
        precision, seed: Precision and seed of the run.
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
    """Return the origin of the weights in a checkpoint.

    Args:
        saved: Content of the checkpoint.
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
