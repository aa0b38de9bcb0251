"""Filters for messages of other libraries, which are hidden while commands run, except with `-v`."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

VERBOSE = "TVR_VERBOSE"
"""Environment variable for `-v`, which processes of other devices inherit."""
_REMARKS = (
    # about settings that the user has not changed
    "The number of training batches .* is smaller than the logging interval",
    ".* does not have many workers which may be a bottleneck",
    "Trying to infer the `batch_size` from an ambiguous collection",
    # evaluation needs no checkpoint callback, regardless of the run that wrote the checkpoint
    "Be aware that when using `ckpt_path`",
    # a resumed run writes to its existing folder
    "Checkpoint directory .* exists and is not empty",
    "Experiment logs directory .* exists",
    # in Lightning's own code
    ".*LeafSpec.* is deprecated",
)


def is_verbose() -> bool:
    """Return whether to show all messages of libraries."""
    return os.environ.get(VERBOSE, "") not in ("", "0")


def own_message(record: logging.LogRecord) -> bool:
    """Return whether a message in Lightning's loggers is a warning, or one of this project."""
    theirs = {"lightning", "pytorch_lightning", "lightning_utilities", "lightning_fabric"}
    return record.levelno > logging.INFO or is_verbose() or not theirs & set(Path(record.pathname).parts)


def quieten() -> None:
    """Hide Lightning's tips and device messages. Call it after importing Lightning; repeated calls have no effect."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(own_message)
    if not is_verbose():
        for remark in _REMARKS:
            warnings.filterwarnings("ignore", message=remark)
