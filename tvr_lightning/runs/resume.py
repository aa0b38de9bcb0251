"""Reliable checkpoints for long runs: written atomically, saved on interruption, and resumed exactly."""

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

from tvr_lightning.errors import UserError
from tvr_lightning.files import lock_open
from tvr_lightning.training.checkpoints import RECORD, read_checkpoint
from tvr_lightning.training.distributed import gather_objects, rank, world_size

RUNNING = "running.ckpt"
"""Name of the checkpoint that a run writes between epochs and when it is interrupted."""
LAST = "last.ckpt"
"""Name of the checkpoint that a run writes at the end of every epoch."""
# Windows has no SIGUSR1.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class RunInterruptedError(UserError):
    """Interruption of training after its state was saved; the message contains the checkpoint.

    Job scripts can use the exit status, which is unique to interruptions, to queue the run again.
    """

    exit_status = os.EX_TEMPFAIL


@dataclass
class CheckpointConfig:
    """Settings for saving a run in addition to its best and last checkpoint, and for resuming it.

    Attributes:
        every_n_steps: number of optimizer steps between saves of `running.ckpt`; None saves only at interruptions.
        resume: resumption from the newest checkpoint of this method and dataset in `results.directory`; without one, a
            new run starts. Use it for jobs that are queued again after an interruption.

    Raises:
        UserError: `every_n_steps` is below 1.
    """

    every_n_steps: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every_n_steps is not None and self.every_n_steps < 1:
            raise UserError(f"checkpoints.every_n_steps is {self.every_n_steps}; expected at least 1, or null")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint writer that replaces files atomically after they are complete and flushed to disk.

    Lightning's own writer uses the system's temporary folder. Moving a file from there to another file system is a
    copy, which stays incomplete if the process is killed or the disk is full.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`, or leave an existing file unchanged on failure.

        Raises:
            UserError: The disk is full, or the folder is not writable.
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
            with partial.open("xb") as file:  # with permissions by the user's umask
                lock_open(file.fileno())
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
                partial.replace(target)  # while it is locked
        except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
            with contextlib.suppress(OSError):  # the first error counts
                partial.unlink()
            former = "The previous checkpoint is intact" if target.exists() else "There is no previous checkpoint"
            raise UserError(
                f"{target} could not be written ({str(error).splitlines()[0]}). {former}. Free disk space, raise the "
                "file size limit (ulimit -f), or choose another folder with results.directory; then resume the run."
            ) from error


def sweep_partial(folder: Path) -> None:
    """Delete incomplete checkpoints of killed processes; files that are being written stay.

    Args:
        folder: Folder of all runs of a method on a dataset.
    """
    for path in folder.glob("*/checkpoints/.*.ckpt.*"):
        # The writer may finish at this moment, or belong to another user.
        with contextlib.suppress(FileNotFoundError, PermissionError), path.open("rb") as file:
            if lock_open(file.fileno()):
                path.unlink()


class RunCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` that updates its stored paths to the folder of the loaded checkpoint.

    Lightning's own class keeps the paths of the machine and folder where it wrote them. For a run folder that was
    copied or moved, it would continue to name and test the original files.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the run's folder, which the first process broadcasts to all others."""
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.log_dir or "").resolve() / "checkpoints")
        super().setup(trainer, pl_module, stage)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Replace the original folder in the stored paths by the folder of the loaded checkpoint.

        Raises:
            CheckpointError: The best checkpoint in the folder is damaged.
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
                    # Written after the loaded checkpoint by a run that was then killed: its score counts.
                    state = checkpoint["callbacks"][self.state_key] = saved["callbacks"][self.state_key]

        def here(path: str) -> str:
            return str(folder / Path(path).name) if path else path

        state["dirpath"] = str(folder)
        for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
            state[name] = here(state[name])
        state["best_k_models"] = {here(path): score for path, score in state["best_k_models"].items()}


class RandomState(Callback):
    """Callback that saves the random state of every process and isolates it from evaluation.

    Dropout and noise are then the same regardless of interruptions and validations.
    """

    def __init__(self) -> None:
        self._to_restore: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all processes in rank order; all processes must call it."""
        return {"processes": gather_objects(random_state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state to restore when training starts.

        With another number of processes, the random numbers restart from the seed, because they cannot be continued.
        """
        states = state_dict["processes"]
        self._to_restore = states[rank()] if len(states) == world_size() else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Restore the state before the first step after a resume."""
        if self._to_restore is not None:
            restore_random_state(self._to_restore)
            self._to_restore = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the random state of training."""
        self._before_validation = random_state()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the random state of training."""
        if self._before_validation is not None:
            restore_random_state(self._before_validation)
            self._before_validation = None


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators as plain values and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


class SaveRunning(Checkpoint):
    """Callback that saves `running.ckpt` every N steps and on SIGTERM or SIGUSR1, which then end the run.

    A signal takes effect after the current batch, on all processes together, regardless of which process received it.
    If the batch is followed by a validation or ends its epoch, these are completed first, because Lightning would skip
    them when it resumes from an earlier checkpoint. After the last batch of an epoch, only `last.ckpt` is saved.

    Lightning calls the hooks of a `Checkpoint` after the hooks of all other callbacks. This callback's hooks must run
    after those of the best and last checkpoint, so add it after them.

    Args:
        every_n_steps: number of optimizer steps between two saves; None saves only at signals.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self.received = 0
        self._saved_at = -1
        self._stopped_early = False
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record whether early stopping has ended the run, which Lightning does not save."""
        checkpoint["stopped_early"] = trainer.should_stop and trainer.early_stopping_callback is not None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the early stopping state."""
        self._stopped_early = bool(checkpoint.get("stopped_early"))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the signals instead of Lightning, which saves in the middle of a step or ends without saving."""
        self._saved_at = trainer.global_step
        loop = trainer.fit_loop
        if loop.restarted_on_epoch_end:
            # With max_steps, Lightning would enter the finished epoch again and count it twice.
            loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
                part._restarting = False
        if self._stopped_early:
            trainer.should_stop = True
        if trainer.received_sigterm:  # while Lightning handled signals
            self.received = signal.SIGTERM
        self._listen()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a save is due, or stop.

        Raises:
            RunInterruptedError: A process received a signal; the checkpoint is written.
        """
        fetcher = trainer.fit_loop._data_fetcher
        validates = fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
        if self._in_between(trainer) and not validates:
            self._save_or_stop(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save or stop in the middle of an epoch, if the batch before the validation could not.

        Raises:
            RunInterruptedError: A process received a signal; the checkpoint is written.
        """
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and self._in_between(trainer):
            self._save_or_stop(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if a signal was received; the last checkpoint has just been written.

        Raises:
            RunInterruptedError: A process received a signal.
        """
        self._stop(trainer, _largest(self.received, pl_module.device), checkpoint_folder(trainer) / LAST)

    def _in_between(self, trainer: Trainer) -> bool:
        """Return True if training continues in this epoch and no accumulated gradients are pending."""
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
        trainer.save_checkpoint(path, weights_only=False)  # with the optimizer state
        self._saved_at = step
        self._stop(trainer, received, path)

    def _stop(self, trainer: Trainer, received: int, path: Path) -> None:
        if received:
            raise RunInterruptedError(
                f"The run was stopped by {signal.Signals(received).name} after step {trainer.global_step} and saved "
                f"{path}. Resume it with --ckpt_path={path}, or with --checkpoints.resume=true"
            )

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the signals also during the test after training."""
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
        """Stop if a signal was received; there is nothing to save.

        Raises:
            RunInterruptedError: A process received a signal. All processes test equally many batches.
        """
        received = _largest(self.received, pl_module.device)
        if received:
            raise RunInterruptedError(
                f"The run was stopped by {signal.Signals(received).name} while testing the trained weights. Nothing is "
                "lost. Test them again with --checkpoints.resume=true"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the previous signal handlers."""
        self._give_back()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the previous signal handlers."""
        self._give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the previous signal handlers."""
        self._give_back()

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():  # only this thread can handle signals
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
    """Return the best checkpoint in `folder` for resuming: the one with the most steps of the newest run.

    Versions and steps are compared instead of times, because clocks may be set back. Best checkpoints are ignored,
    because they may be older than the end of their run.

    Args:
        folder: Folder of all runs of a method on a dataset.
        same: Predicate on the folders of runs with such a checkpoint, called newest first until it returns True.

    Raises:
        CheckpointError: A checkpoint of the run is damaged.
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
    # At the same step, the last checkpoint is newer: it is written after the validation.
    return int(read_checkpoint(checkpoint)["global_step"]), checkpoint.name == LAST
