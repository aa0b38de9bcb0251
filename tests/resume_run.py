"""A training process that tests kill: arguments are those of `tvr`, preceded by a signal and a step.

Of several processes, the variable STRIKE_RANK names the one that is hit.
"""

import os
import signal
import sys

import torch

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision

# isort: split
from lightning.pytorch import Callback

import tvr_lightning.recipe as recipe
from tvr_lightning.cli import main


class Strike(Callback):
    """Sends this process a signal in the middle of a step."""

    number = signal.SIGKILL
    step = -1

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        hit = int(os.environ.get("STRIKE_RANK", trainer.global_rank)) == trainer.global_rank
        if hit and trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


def strike_in(step: int, number: int) -> None:
    """Have every trainer of this process hit by a signal in `step`."""
    build = recipe.RecipeCLI.instantiate_trainer
    strike = Strike()
    strike.step, strike.number = step, number

    def with_strike(self, **kwargs):
        trainer = build(self, **kwargs)
        trainer.callbacks.append(strike)
        return trainer

    recipe.RecipeCLI.instantiate_trainer = with_strike


if __name__ == "__main__":
    torch.set_num_threads(1)
    strike_in(int(sys.argv[2]), signal.Signals[sys.argv[1]])
    sys.exit(main(sys.argv[3:]))
