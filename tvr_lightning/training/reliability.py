"""Long runs that survive: whole checkpoints, saved in time, from which training goes on exactly."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from tvr_lightning.checkpoints import RECORD, read_checkpoint
from tvr_lightning.errors import UserError
from tvr_lightning.files import lock_open
from tvr_lightning.training.distributed import gather_objects, rank, world_size

RUNNING = "running.ckpt"
"""Name of the checkpoint that a run writes in between and when it is interrupted."""
LAST = "last.ckpt"
"""Name of the checkpoint that a run writes at the end of every epoch."""
# Windows has no SIGUSR1.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class RunInterruptedError(UserError, RuntimeError):
    """Training was told to stop, and saved where it was; says where.

    Its exit status tells job scripts to queue the run again, which no other end of a run does.
    """

    exit_status = os.EX_TEMPFAIL


@dataclass
class CheckpointConfig:
    """When a run saves itself besides the best and the last checkpoint, and whether it goes on from what it saved.

    Attributes:
        every_n_steps: save `running.ckpt` every N optimizer steps; None saves only at interruptions.
        resume: resume from the newest checkpoint of this method and dataset in `results.directory`; without one, a new
            run starts. Use it for jobs that are queued again after an interruption.

    Raises:
        ValueError: `every_n_steps` is below 1.
    """

    every_n_steps: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every_n_steps is not None and self.every_n_steps < 1:
            raise ValueError(f"checkpoints.every_n_steps is {self.every_n_steps}; expected at least 1, or null")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints beside their place and moves them there when they are whole and on the disk.

    Lightning's own writes to the system's temporary folder; from there to another file system a move is a copy, which
    a kill or a full disk leaves half done.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`, or leave what is there untouched.

        Raises:
            UserError: the disk is full, or the folder cannot be written.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        if RECORD in checkpoint:
            checkpoint[RECORD]["file"] = target.stem  # a file may be renamed, and callbacks do not know the name
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("xb") as file:  # with the rights that the user's umask leaves
                lock_open(file.fileno())
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
                partial.replace(target)  # while it is held
        except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
            with contextlib.suppress(OSError):  # the first error counts
                partial.unlink()
            former = "The previous checkpoint is intact" if target.exists() else "There is no previous checkpoint"
            raise UserError(
                f"{target} could not be written ({str(error).splitlines()[0]}). {former}. Free disk space, raise the "
                "file size limit (ulimit -f), or choose another folder with results.directory; then resume the run."
            ) from error


def sweep_partial(folder: Path) -> None:
    """Delete what killed processes left of checkpoints that they were writing; what is being written stays.

    Args:
        folder: of all runs of a method on a dataset.
    """
    for path in folder.glob("*/checkpoints/.*.ckpt.*"):
        # Its writer may finish just now, or be somebody else.
        with contextlib.suppress(FileNotFoundError, PermissionError), path.open("rb") as file:
            if lock_open(file.fileno()):
                path.unlink()


class RunCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that knows its files again where the checkpoint lies from which the run goes on.

    Lightning's own keeps the paths of the machine and folder where it wrote them: of a run folder that was copied or
    moved it would go on to name, and test, the files of the original.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write to the run's folder, which all processes learn from the first one."""
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.log_dir or "").resolve() / "checkpoints")
        super().setup(trainer, pl_module, stage)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the folder of the checkpoint that is loaded in place of the one where it was written.

        Raises:
            CheckpointError: the best checkpoint beside it is damaged.
        """
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is None or "://" in str(trainer.ckpt_path):
            return
        folder = Path(str(trainer.ckpt_path)).absolute().parent
        if self.dirpath and Path(self.dirpath).absolute() == folder:
            folder = Path(self.dirpath)
            best = folder / f"{self.filename}.ckpt"
            if self.monitor != "step" and best.is_file():
                saved = read_checkpoint(best)
                if saved["global_step"] > checkpoint["global_step"]:
                    # Of a run that was killed later, and took the place of the former best: its score counts.
                    state = checkpoint["callbacks"][self.state_key] = saved["callbacks"][self.state_key]

        def here(path: str) -> str:
            return str(folder / Path(path).name) if path else path

        state["dirpath"] = str(folder)
        for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
            state[name] = here(state[name])
        state["best_k_models"] = {here(path): score for path, score in state["best_k_models"].items()}


class RandomState(Callback):
    """Carries the random numbers of every process over an interruption, and keeps evaluation from using them up.

    A run then draws the same dropout and noise however often it is interrupted or validated.
    """

    def __init__(self) -> None:
        self._to_restore: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all processes in rank order; all of them must call it."""
        return {"processes": gather_objects(random_state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember what to restore when training starts.

        Another number of processes starts anew from the seed, since it cannot draw what they would have drawn.
        """
        states = state_dict["processes"]
        self._to_restore = states[rank()] if len(states) == world_size() else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Restore the state before the first step after a resume."""
        if self._to_restore is not None:
            restore_random_state(self._to_restore)
            self._to_restore = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the state that training goes on with."""
        self._before_validation = random_state()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the random numbers that training had before the evaluation."""
        if self._before_validation is not None:
            restore_random_state(self._before_validation)
            self._before_validation = None


def random_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's generators as plain values and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


class SaveRunning(Checkpoint):
    """Saves `running.ckpt` every so many steps and when SIGTERM or SIGUSR1 comes, which then ends the run.

    A signal takes effect after the batch at hand, on all processes together, whichever of them received it. Where the
    batch is followed by a validation or ends its epoch, that comes first: a checkpoint from in between would have
    Lightning skip, when it goes on, what was still to come. After the last batch of an epoch `last.ckpt` is the
    checkpoint, and nothing is saved besides.

    Lightning calls the hooks of a `Checkpoint` after those of all other callbacks, and this one's must come after
    those of the best and the last checkpoint: add it behind them.

    Args:
        every_n_steps: optimiser steps between two saves; None saves at signals only.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self.received = 0
        self._saved_at = -1
        self._stopped_early = False
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note whether early stopping has ended the run, which Lightning forgets."""
        checkpoint["stopped_early"] = trainer.should_stop and trainer.early_stopping_callback is not None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take up whether early stopping had ended the run."""
        self._stopped_early = bool(checkpoint.get("stopped_early"))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the signals in place of Lightning, which saves in the middle of a step or ends without saving."""
        self._saved_at = trainer.global_step
        loop = trainer.fit_loop
        if loop.restarted_on_epoch_end:
            # With max_steps Lightning would go into the finished epoch once more and count it twice.
            loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
                part._restarting = False
        if self._stopped_early:
            trainer.should_stop = True
        if trainer.received_sigterm:  # while Lightning was listening
            self.received = signal.SIGTERM
        self._listen()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time to, or stop.

        Raises:
            RunInterruptedError: a signal came on any process; the checkpoint is written.
        """
        fetcher = trainer.fit_loop._data_fetcher
        validates = fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
        if self._in_between(trainer) and not validates:
            self._save_or_stop(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save or stop in the middle of an epoch, where the batch before the validation could not.

        Raises:
            RunInterruptedError: a signal came on any process; the checkpoint is written.
        """
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and self._in_between(trainer):
            self._save_or_stop(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if a signal came; the last checkpoint has just been written.

        Raises:
            RunInterruptedError: a signal came on any process.
        """
        self._stop(trainer, _largest(self.received, pl_module.device), checkpoint_folder(trainer) / LAST)

    def _in_between(self, trainer: Trainer) -> bool:
        """Whether training goes on in this epoch, from weights that no gradients wait to change."""
        loop = trainer.fit_loop
        stops = trainer.should_stop and loop._can_stop_early
        return not loop._should_accumulate() and not loop.epoch_loop._is_training_done and not stops

    def _save_or_stop(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        received = _largest(self.received, pl_module.device)
        due = self.every_n_steps is not None and step % self.every_n_steps == 0 and step != self._saved_at
        if not received and not due:
            return
        path = checkpoint_folder(trainer) / RUNNING
        trainer.save_checkpoint(path, weights_only=False)  # with the optimiser, that is
        self._saved_at = step
        self._stop(trainer, received, path)

    def _stop(self, trainer: Trainer, received: int, path: Path) -> None:
        if received:
            raise RunInterruptedError(
                f"The run was stopped by {signal.Signals(received).name} after step {trainer.global_step} and saved "
                f"{path}. Resume it with --ckpt_path={path}, or with --checkpoints.resume=true"
            )

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the signals also while the weights are tested that training ended with."""
        self._listen()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop if a signal came; there is nothing to save.

        Raises:
            RunInterruptedError: a signal came on any process; all of them test equally many batches.
        """
        received = _largest(self.received, pl_module.device)
        if received:
            raise RunInterruptedError(
                f"The run was stopped by {signal.Signals(received).name} while testing the trained weights. Nothing is "
                "lost. Test them again with --checkpoints.resume=true"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the signals back."""
        self._give_back()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the signals back."""
        self._give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._give_back()

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals nowhere else
            for number in SIGNALS:
                self._handlers[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def _give_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()


def _largest(value: int, device: torch.device) -> int:
    """Return the largest of the values of all processes."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def checkpoint_folder(trainer: Trainer) -> Path:
    """Return the folder of a run's checkpoints, the same on all processes."""
    checkpoint = trainer.checkpoint_callback
    if isinstance(checkpoint, ModelCheckpoint) and checkpoint.dirpath:
        return Path(checkpoint.dirpath)
    return Path(trainer.strategy.broadcast(trainer.log_dir or trainer.default_root_dir)) / "checkpoints"


def newest_checkpoint(folder: Path, same: Callable[[Path], bool] = lambda run: True) -> Path | None:
    """Return the checkpoint below `folder` from which a run can go on best: the furthest one of the newest run.

    Versions and steps are counted, for clocks may be set back. Best checkpoints do not count; they lie behind the end
    of the run that wrote them.

    Args:
        folder: of all runs of a method on a dataset.
        same: asked about the folder of every run that has such a checkpoint, newest first, until it says yes.

    Raises:
        CheckpointError: one of the run's checkpoints is damaged.
    """
    runs = {path.parent.parent for name in (RUNNING, LAST) for path in folder.glob(f"*/checkpoints/{name}")}
    for run in sorted(runs, key=_version, reverse=True):
        if same(run):
            found = [run / "checkpoints" / name for name in (RUNNING, LAST)]
            return max([path for path in found if path.is_file()], key=_step)
    return None


def _version(run: Path) -> tuple[int, str]:
    number = run.name.rpartition("_")[2]
    return (int(number) if number.isdecimal() else -1, run.name)


def _step(checkpoint: Path) -> tuple[int, bool]:
    # At the same step the last checkpoint is the later one: it lies behind the validation.
    return int(read_checkpoint(checkpoint)["global_step"]), checkpoint.name == LAST
