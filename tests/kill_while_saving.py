"""A training process that is killed while a thread writes its second `running.ckpt`; arguments are those of `tvr`.

The write ends in the middle, after the training has made another step.
"""

import os
import signal
import sys
import time

import torch

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision

# isort: split
from lightning.pytorch import Callback

import tvr_lightning.runs.run as run
from tvr_lightning.cli import main
from tvr_lightning.runs.resume import AtomicCheckpointIO


class Steps(Callback):
    """Number of optimizer steps so far."""

    now = 0

    def on_train_batch_end(self, trainer, *arguments):
        self.now = trainer.global_step


def kill_in_second_write() -> None:
    build, save, write, steps, writes = run.Run.build_trainer, torch.save, AtomicCheckpointIO._write, Steps(), []

    def with_steps(self, **kwargs):
        trainer = build(self, **kwargs)
        trainer.callbacks.append(steps)
        return trainer

    def half(checkpoint, file):
        save(checkpoint, file)
        if len(writes) == 2:
            file.truncate(file.tell() // 2)
            file.flush()
            while steps.now <= checkpoint["global_step"]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self, checkpoint, target):
        writes.append(target)
        write(self, checkpoint, target)

    run.Run.build_trainer, torch.save, AtomicCheckpointIO._write = with_steps, half, counted


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_in_second_write()
    sys.exit(main(sys.argv[1:]))
