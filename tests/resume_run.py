"""Run `tvr` with the arguments after a signal and a step, and send the process the signal in this step.

Of several processes, the one with rank STRIKE_RANK gets the signal. With the arguments `SIGKILL writing`, the process
is killed while a thread writes its second `running.ckpt`, in the middle of the file and one step later.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision

# isort: split
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback

from tvr_lightning.cli import main
from tvr_lightning.runs.resume import AtomicCheckpointIO
from tvr_lightning.runs.run import Run


def add_callback(callback: Callback) -> None:
    """Add a callback to every trainer of this process."""
    build = Run.build_trainer

    def with_callback(self, **kwargs):
        trainer = build(self, **kwargs)
        trainer.callbacks.append(callback)
        return trainer

    Run.build_trainer = with_callback


def strike_in(step: int, number: int) -> None:
    """Send this process a signal in a step of every training."""

    def strike(trainer, module, optimizer):
        struck = int(os.environ.get("STRIKE_RANK", trainer.global_rank)) == trainer.global_rank
        if struck and trainer.global_step == step:
            trainer.strategy.checkpoint_io.teardown()  # another test kills the process while it writes a checkpoint
            os.kill(os.getpid(), number)

    add_callback(LambdaCallback(on_before_optimizer_step=strike))


def kill_in_second_write() -> None:
    save, write, steps, writes = torch.save, AtomicCheckpointIO._write, [0], []
    add_callback(LambdaCallback(on_train_batch_end=lambda trainer, *batch: steps.append(trainer.global_step)))

    def half(checkpoint, file):
        save(checkpoint, file)
        if len(writes) == 2:
            file.truncate(file.tell() // 2)
            file.flush()
            while steps[-1] <= checkpoint["global_step"]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self, checkpoint, target):
        writes.append(target)
        write(self, checkpoint, target)

    torch.save, AtomicCheckpointIO._write = half, counted


def differences(found: dict, expected: dict) -> list[str]:
    """List the differences in weights, optimizer, progress, random states, and callbacks of two checkpoints."""
    lines: list[str] = []
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "callbacks", "loops"):
        _compare(found[key], expected[key], key, lines)
    return lines


def _compare(found, expected, name, lines):
    if type(found) is not type(expected):
        lines.append(f"{name}: {found!r:.60}, expected {expected!r:.60}")
    elif isinstance(expected, torch.Tensor):
        if not torch.equal(found, expected):
            lines.append(f"{name}: other values")
    elif isinstance(expected, dict):
        found, expected = ({_file(key): value for key, value in values.items()} for values in (found, expected))
        for key in expected.keys() ^ found.keys():
            lines.append(f"{name}.{key}: in one of them only")
        for key in expected.keys() & found.keys():
            if key not in ("dirpath", "current_score"):  # Lightning saves the latter and never reads it
                _compare(found[key], expected[key], f"{name}.{key}", lines)
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            lines.append(f"{name}: {len(found)} items, expected {len(expected)}")
        for i, (one, other) in enumerate(zip(found, expected, strict=False)):
            _compare(one, other, f"{name}[{i}]", lines)
    elif _file(found) != _file(expected):
        lines.append(f"{name}: {found!r:.60}, expected {expected!r:.60}")


def _file(value):
    """Return the name of a checkpoint without its folder, and other values unchanged."""
    return Path(value).name if isinstance(value, str) and value.endswith(".ckpt") else value


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "writing":
        kill_in_second_write()
    else:
        strike_in(int(sys.argv[2]), signal.Signals[sys.argv[1]])
    sys.exit(main(sys.argv[3:]))
