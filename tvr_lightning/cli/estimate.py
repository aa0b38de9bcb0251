"""`tvr fit --estimate`: the memory, disk space, and time of a run, measured before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvr_lightning.config.recipe import RecipeCLI
from tvr_lightning.reproduce.profile.estimate import estimate
from tvr_lightning.runs.folder import RunTrainer

COUNTED = (
    "precision", "max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "overfit_batches", "accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch",
)  # fmt: skip
"""Options of the trainer that decide how much a run computes."""


class EstimateCLI(RecipeCLI):
    """A recipe with its method and data, and a trainer on one device of this machine."""

    def instantiate_trainer(self, **kwargs: Any) -> RunTrainer:
        """Build a trainer that counts as the recipe's does, and writes nothing."""
        options = {name: self.config_init.trainer.get(name) for name in COUNTED}
        return RunTrainer(
            accelerator="auto", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, **options,
        )  # fmt: skip


def estimate_fit(words: Sequence[str]) -> int:
    """Print the requirements of `tvr fit` with these arguments; train nothing and write nothing."""
    print(estimate(EstimateCLI(args=list(words), run=False)))
    return 0
