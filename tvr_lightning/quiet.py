"""What other libraries say while this project's verbs run: kept back, unless `-v` asks for it."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

VERBOSE = "TVR_VERBOSE"
"""Environment variable that `-v` sets, so that processes started for further devices know it too."""
# Said on every run about what a user has not asked for.
_REMARKS = (
    "The number of training batches .* is smaller than the logging interval",
    ".* does not have many workers which may be a bottleneck",
    "Trying to infer the `batch_size` from an ambiguous collection",
)


def is_verbose() -> bool:
    """Whether everything that libraries say is wanted."""
    return os.environ.get(VERBOSE, "") not in ("", "0")


class OwnWords(logging.Filter):
    """Lets through what warns, and what this project says itself through Lightning's loggers."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is said."""
        theirs = {"lightning", "pytorch_lightning", "lightning_utilities", "lightning_fabric"}
        return record.levelno > logging.INFO or is_verbose() or not theirs & set(Path(record.pathname).parts)


def quieten() -> None:
    """Keep back Lightning's tips and remarks on devices; called once it is imported, a second call changes nothing."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(known, OwnWords) for known in handler.filters):
                handler.addFilter(OwnWords())
    if not is_verbose():
        for remark in _REMARKS:
            warnings.filterwarnings("ignore", message=remark)
