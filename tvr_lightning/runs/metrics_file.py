"""`metrics.csv` of a run: its logged values, one column each, which a resumed run continues."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from tvr_lightning.training.checkpoints import read_checkpoint

FILE = "metrics.csv"


def metrics_logger(folder: Path, resume_from: Path | None = None) -> CSVLogger:
    """Return the logger of `metrics.csv` in a run's folder, which keeps the rows of the steps before `resume_from`."""
    rows = []
    if resume_from is not None and (folder / FILE).is_file():
        steps = read_checkpoint(resume_from)["global_step"]
        with (folder / FILE).open(newline="", encoding="utf-8") as file:
            complete = [row for row in csv.DictReader(file) if None not in row.values()]
        rows = [row for row in complete if int(row["step"]) < steps]
    logger = CSVLogger(folder.parent, name=None, version=folder.name, flush_logs_every_n_steps=1)
    for row in rows:
        logger.experiment.log_metrics({name: value for name, value in row.items() if value}, int(row["step"]))
    logger.save()
    return logger
