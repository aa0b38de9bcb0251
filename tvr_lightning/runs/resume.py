"""Reliable checkpoints for long runs: written atomically, saved on interruption, and resumed exactly."""

import functools
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, StochasticWeightAveraging
from lightning_utilities.core.apply_func import apply_to_collection
from typing_extensions import override

from tvr_lightning import __version__
from tvr_lightning.data.loader import TrainingLoader
from tvr_lightning.errors import UserError
from tvr_lightning.runs.folder import run_number
from tvr_lightning.training.checkpoints import RECORD, read_checkpoint, write_checkpoint
from tvr_lightning.training.distributed import gather_objects, rank, world_size
from tvr_lightning.training.loss_check import LossCheck

RUNNING, LAST = "running.ckpt", "last.ckpt"
"""Checkpoints that a run writes within an epoch or when it is interrupted, and at the end of every epoch."""


class RunInterruptedError(UserError):
    """Interruption of training after its state was saved. Job scripts can queue the run again by its exit status."""

    exit_status = os.EX_TEMPFAIL


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint writer that replaces files atomically after they are complete and flushed to disk.

    Lightning's own writer moves a file from the system's temporary folder, which may be a copy that stays incomplete if
    the process is killed. `running.ckpt` is written by a thread while training continues; the next checkpoint and
    `teardown` wait for it and raise its error.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}  # entry of every checkpoint about its run, to describe its weights
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.teardown()
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        elif Path(path).name == RUNNING:
            now = apply_to_collection(checkpoint, torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
            self._writing = self._thread.submit(self._write, now, Path(path))
        else:
            self._write(checkpoint, Path(path))

    @override
    def teardown(self) -> None:
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _write(self, checkpoint: dict[str, Any], target: Path) -> None:
        # A file may be renamed later.
        checkpoint[RECORD] = self.record | {"file": target.stem, "version": __version__}
        write_checkpoint(checkpoint, target, "choose another folder with results.directory; then resume the run")


def checkpoint_folder(trainer: Trainer) -> Path:
    """Return the folder of a run's checkpoints. All processes must call it, because the first one knows the folder."""
    return Path(trainer.log_dir or "").resolve() / "checkpoints"


class RunCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` in the run's folder that finds its files again if the folder was moved or copied.

    Lightning's own class would continue to name and test the original files. After the last epoch, `last.ckpt` contains
    the average of `StochasticWeightAveraging`, which replaces the weights only when training ends.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dirpath = self.dirpath or str(checkpoint_folder(trainer))
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = trainer.callbacks if self.monitor == "step" else ()  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch >= callback.swa_end:
                callback.transfer_weights(cast(LightningModule, callback._average_model), pl_module)
                cast(AtomicCheckpointIO, trainer.strategy.checkpoint_io).record["averaged"] = True
        super().on_train_epoch_end(trainer, pl_module)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is None:
            return
        folder = Path(str(trainer.ckpt_path)).resolve().parent
        best = folder / f"{self.filename}.ckpt"
        if self.dirpath == str(folder) and self.monitor != "step" and best.is_file():
            saved = read_checkpoint(best)
            if saved["global_step"] > checkpoint["global_step"]:
                # Written after the loaded checkpoint by a run that was then killed: its score counts.
                state = checkpoint["callbacks"][self.state_key] = saved["callbacks"][self.state_key]
        state["dirpath"] = str(folder)
        for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
            if state[name]:
                state[name] = str(folder / Path(state[name]).name)
        state["best_k_models"] = {str(folder / Path(path).name): k for path, k in state["best_k_models"].items()}


class RandomState(Callback):
    """Callback that saves the random state of every process, so that dropout and noise resume exactly.

    Validations do not change it.
    """

    _to_restore: dict[str, Any] | None = None
    _before_validation: dict[str, Any]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"processes": gather_objects(random_state())}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # With another number of processes, random numbers restart.
        states = state_dict["processes"]
        self._to_restore = states[rank()] if len(states) == world_size() else None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._to_restore is not None:
            restore_random_state(self._to_restore)
            self._to_restore = None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before_validation = random_state()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        restore_random_state(self._before_validation)


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators as plain values and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, [int(key) for key in keys], *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore a `random_state`."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


class SaveRunning(Checkpoint):
    """Callback that saves `running.ckpt` every N steps, if given, and on SIGTERM or SIGUSR1, which then end the run.

    It acts before the next batch of an epoch is read, when a validation after the previous step is complete. After the
    last step of an epoch, `last.ckpt` is the checkpoint, so this callback must be added after the one that writes it. A
    signal ends all processes together, regardless of which one received it. Several processes share it in the reduction
    of `LossCheck`, so that they stop one step later.
    """

    received = 0
    _between_steps = False
    _validated_at = -1
    _stopped_early = False

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self._handlers: dict[int, Any] = {}

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning does not save whether early stopping ended the run.
        checkpoint["stopped_early"] = trainer.should_stop and trainer.early_stopping_callback is not None
        checkpoint["validated_at"] = self._validated_at
        if self._between_steps and self._validated_at == trainer.global_step:
            # After a resume, Lightning skips this validation, but counts its step again.
            checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._stopped_early = bool(checkpoint.get("stopped_early"))
        self._validated_at = checkpoint.get("validated_at", -1)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if loop.restarted_on_epoch_end:
            # With max_steps, Lightning would enter the finished epoch again and count it twice.
            loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            loop.epoch_loop.restarting = False
        if self._stopped_early:
            trainer.should_stop = True
        if trainer.received_sigterm:  # while Lightning handled signals
            self.received = signal.SIGTERM
        # Lightning would save in the middle of a step, or end without saving.
        self.on_test_start(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loader = cast(TrainingLoader, trainer.train_dataloader)
        loader.before_next = functools.partial(self._save_or_stop, trainer, pl_module)

    def _save_or_stop(self, trainer: Trainer, pl_module: LightningModule) -> None:
        losses = cast(LossCheck, pl_module.loss_check)
        received = self.received if world_size() == 1 else losses.stop_all
        losses.stop = self.received
        if (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches:
            return  # in the middle of a step
        due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if received or due:
            self._between_steps = True
            trainer.save_checkpoint(checkpoint_folder(trainer) / RUNNING, weights_only=False)  # with optimizer state
            self._between_steps = False
            if received:
                trainer.strategy.checkpoint_io.teardown()  # waits until it is written
            self._stop(trainer, received, RUNNING)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_at = trainer.global_step

    @override
    def on_train_epoch_end(self, trainer: Trainer, *arguments: Any, **named: Any) -> None:
        received = torch.tensor(self.received, device=trainer.strategy.root_device)
        self._stop(trainer, int(trainer.strategy.reduce(received, reduce_op="max")), LAST)

    on_test_batch_end = on_train_epoch_end  # `last.ckpt` is written

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():  # only this thread can handle signals
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._handlers[number] = signal.signal(number, self._receive)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._receive:  # else Lightning has restored what was there before it
                signal.signal(number, handler)
        self._handlers.clear()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    def _receive(self, number: int, frame: object) -> None:
        self.received = number

    def _stop(self, trainer: Trainer, received: int, saved: str) -> None:
        if received:
            path = checkpoint_folder(trainer) / saved
            raise RunInterruptedError(
                f"The run was stopped by {signal.Signals(received).name} after step {trainer.global_step} and saved "
                f"{path}. Resume it with --checkpoints.resume=true or --ckpt_path={path}"
            )


def newest_checkpoint(folder: Path, same: Callable[[Path], bool] = lambda run: True) -> Path | None:
    """Return the checkpoint with the most steps of the newest run in `folder` for which `same` is true.

    Versions and steps are compared instead of times, because clocks may be set back.
    """
    runs = {path.parent.parent for name in (RUNNING, LAST) for path in folder.glob(f"*/checkpoints/{name}")}
    for run in sorted(runs, key=run_number, reverse=True):
        if same(run):
            # At the same step, the last checkpoint is newer: it is written after the validation.
            found = [run / "checkpoints" / name for name in (LAST, RUNNING)]
            return max(filter(Path.is_file, found), key=lambda path: int(read_checkpoint(path)["global_step"]))
    return None
