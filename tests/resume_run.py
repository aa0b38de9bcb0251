"""A training process that tests kill: arguments are those of `tvr`, preceded by a signal and a step.

Of several processes, the variable STRIKE_RANK names the one that is hit.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision

# isort: split
from lightning.pytorch import Callback

import tvr_lightning.runs.run as run
from tvr_lightning.cli import main


class Strike(Callback):
    """Sends this process a signal in the middle of a step."""

    number = signal.SIGKILL
    step = -1

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        hit = int(os.environ.get("STRIKE_RANK", trainer.global_rank)) == trainer.global_rank
        if hit and trainer.global_step == self.step:
            trainer.strategy.checkpoint_io.teardown()  # a kill while a checkpoint is written has its own test
            os.kill(os.getpid(), self.number)


def strike_in(step: int, number: int) -> None:
    """Have every trainer of this process hit by a signal in `step`."""
    build = run.Run.build_trainer
    strike = Strike()
    strike.step, strike.number = step, number

    def with_strike(self, **kwargs):
        trainer = build(self, **kwargs)
        trainer.callbacks.append(strike)
        return trainer

    run.Run.build_trainer = with_strike


def differences(found: dict, expected: dict) -> list[str]:
    """Name what differs, bit by bit, between the checkpoints of two runs, be their folders where they may.

    Compared are weights, queues, optimiser, schedule, progress, random numbers, and what is best.
    """
    said: list[str] = []
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "callbacks", "loops"):
        _compare(found[key], expected[key], key, said)
    return said


def _compare(found, expected, name, said):
    if type(found) is not type(expected):
        said.append(f"{name}: {found!r:.60}, expected {expected!r:.60}")
    elif isinstance(expected, torch.Tensor):
        if not torch.equal(found, expected):
            said.append(f"{name}: other values")
    elif isinstance(expected, dict):
        found, expected = ({_file(key): value for key, value in values.items()} for values in (found, expected))
        for key in expected.keys() ^ found.keys():
            said.append(f"{name}.{key}: in one of them only")
        for key in expected.keys() & found.keys():
            if key not in ("dirpath", "current_score"):  # Lightning saves the latter and never reads it
                _compare(found[key], expected[key], f"{name}.{key}", said)
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            said.append(f"{name}: {len(found)} items, expected {len(expected)}")
        for i, (one, other) in enumerate(zip(found, expected, strict=False)):
            _compare(one, other, f"{name}[{i}]", said)
    elif _file(found) != _file(expected):
        said.append(f"{name}: {found!r:.60}, expected {expected!r:.60}")


def _file(value):
    """The name of a checkpoint without its folder, anything else as it is."""
    return Path(value).name if isinstance(value, str) and value.endswith(".ckpt") else value


if __name__ == "__main__":
    torch.set_num_threads(1)
    strike_in(int(sys.argv[2]), signal.Signals[sys.argv[1]])
    sys.exit(main(sys.argv[3:]))
