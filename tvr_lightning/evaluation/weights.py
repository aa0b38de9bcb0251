"""Origin of the evaluated weights: untrained, published, or trained, with run, epoch and selection split."""

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
        epoch, step: number of epochs begun, including the current one, and of optimizer steps.
        chosen_on, monitor: split and name of the score that selected the epoch of the best weights.
        start: for weights without a checkpoint, the initialization of the encoder and the untrained parts; for external
            scores, their file.
        averaged: whether they are an average over training steps, such as an exponential moving average.
        overridden: options of the checkpoint that affect scores and were changed.
    """

    kind: Kind
    run: str | None = None
    epoch: int | None = None
    step: int | None = None
    chosen_on: Literal["val", "test"] | None = None
    monitor: str | None = None
    start: str | None = None
    averaged: bool = False
    overridden: list[str] = field(default_factory=list)

    @property
    def select_on(self) -> Literal["last", "val", "test"] | None:
        """Return the split that selected the weights, `last` if none did, or None if untrained or unknown."""
        if self.kind in ("last", "running"):
            return "last"
        return self.chosen_on if self.kind == "best" else None

    def caption(self) -> str:
        """Return the description of the weights for a results table."""
        counts = {"epoch": self.epoch, "step": self.step}
        where = ", ".join(f"{name} {count}" for name, count in counts.items() if count is not None)
        saved = (f" ({where})" if where else "") + (f" of {self.run}" if self.run else "")
        split = {None: "an unknown split", "test": "the TEST split: optimistic", "val": "the validation split"}
        chosen = f", selected{f' by {self.monitor}' if self.monitor else ''} on {split[self.chosen_on]}"
        caption = {
            "untrained": f"UNTRAINED weights: no checkpoint was given, and {self.start}",
            "zero-shot": f"zero-shot: no checkpoint was given, and {self.start}",
            "last": f"weights of the last step{saved}",
            "best": f"weights of the best epoch{saved}{chosen}",
            "running": f"weights of an interrupted run{saved}",
            "converted": "the authors' weights, converted; how they were selected is unknown",
            "outside": f"EXTERNAL SCORES: {self.start}; how they were computed is unknown",
            "unknown": f"unknown weights: their checkpoint does not record their origin{saved}",
        }[self.kind]
        if self.averaged:
            caption = f"averaged {caption}"
        return caption if self.select_on is None else f"{caption} · select_on: {self.select_on}"


def weights_of(saved: dict[str, Any]) -> Weights:
    """Return the origin of the weights in a checkpoint, given its content."""
    if CONVERTED in saved:
        return Weights("converted")
    record = saved.get(RECORD) or {}
    kind: Kind = record["file"] if record.get("file") in ("last", "best", "running") else "unknown"
    best = record if kind == "best" else {}
    return Weights(
        kind,
        run=record.get("run"),
        epoch=None if saved.get("epoch") is None else int(saved["epoch"]) + 1,
        step=None if saved.get("global_step") is None else int(saved["global_step"]),
        chosen_on=best.get("chosen_on"),
        monitor=best.get("monitor"),
        averaged="averaging_state" in saved or "averaged" in record,
    )
