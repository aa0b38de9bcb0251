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


TRAINED = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "callbacks", "loops")


def differences(found: dict, expected: dict, keys: tuple[str, ...] = TRAINED) -> list[str]:
    """List the differences of two checkpoints: weights, optimizer, progress, random states, and callbacks."""
    found, expected = (dict(_values({key: saved[key] for key in keys}, "")) for saved in (found, expected))
    lines = [f"{name}: in one of them only" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if not (torch.equal(one, other) if tensors else (type(one), one) == (type(other), other)):
            lines.append(f"{name}: {one!r:.60}, expected {other!r:.60}")
    return lines


def _values(value, name):
    """Yield the names and values in nested dictionaries and lists, and the types of the latter."""
    if isinstance(value, (dict, list, tuple)):
        yield name, type(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in ("dirpath", "current_score"):  # Lightning saves the latter and never reads it
                yield from _values(item, f"{name}.{_file(key)}")
    else:
        yield name, _file(value)


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
