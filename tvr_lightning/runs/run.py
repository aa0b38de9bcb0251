"""Run of a recipe: trainer, folder, resuming, and the results table."""

from __future__ import annotations

import errno
import shlex
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichModelSummary
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from tvr_lightning.config.recipe import RecipeCLI, ResultsConfig, plain
from tvr_lightning.config.recipe_files import CHECKPOINTS, EVALUATING, RecipeError
from tvr_lightning.config.trained import WeightsRecord, new_layers, starting_weights
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.answers import AnswerResults, write_answers
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.predictions import write_predictions
from tvr_lightning.evaluation.results import SelectOn, print_results, results_of, write_results
from tvr_lightning.evaluation.weights import Weights, weights_of
from tvr_lightning.methods.video_qa import VideoQuestionAnswering
from tvr_lightning.quiet import is_verbose
from tvr_lightning.runs.bar import RunProgressBar
from tvr_lightning.runs.curves import CurvesLogger
from tvr_lightning.runs.folder import RunTrainer, locked_run, new_run, run_of
from tvr_lightning.runs.log import kept
from tvr_lightning.runs.page import write_query_ranks, write_run_page
from tvr_lightning.runs.resume import (
    AtomicCheckpointIO,
    RandomState,
    RunCheckpoint,
    RunInterruptedError,
    SaveRunning,
    newest_checkpoint,
    sweep_partial,
)
from tvr_lightning.runs.waiting import LoaderWatch, compress_command
from tvr_lightning.training.checkpoints import RECORD, read_checkpoint

MONITOR = "val/t2v_R@1"
# Parts of gloo and NCCL errors if another process has ended.
LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Connection was likely closed")
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# Settings for the execution and outputs of a run, which may change when it is resumed.
ANYWHERE = {
    "ckpt_path", "checkpoints", "results", "eval_memory", "weights_only", "data.init_args.root",
    "data.init_args.num_workers", "trainer.accelerator", "trainer.strategy", "trainer.devices", "trainer.num_nodes",
    "trainer.logger", "trainer.log_every_n_steps", "trainer.enable_progress_bar", "trainer.enable_model_summary",
    "trainer.default_root_dir", "trainer.profiler", "trainer.limit_test_batches",
    "model.init_args.evaluation.memory_gib",
}  # fmt: skip


class RunCLI(RecipeCLI):
    """Command line that runs a recipe with callbacks, loggers, and interruptions, and prints the results table."""

    trainer: RunTrainer
    resume_from: Path | None = None

    def _say_run(self) -> None:
        """Print one line with the method, device, precision, data, weights, and folder of the run."""
        trainer, model = self.trainer, self.model
        folder = trainer.log_dir  # synchronizes with all processes
        if not trainer.is_global_zero:
            return
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        devices = name if trainer.world_size == 1 else f"{trainer.world_size} x {name}"
        checkpoint = self.options.get("ckpt_path")
        start = starting_weights(model, self.options.model.init_args)
        weights = f"weights of {checkpoint}" if checkpoint else f"{start.kind}: {start.start}"
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        where = f"; writes to {folder}" if folder else ""
        line = f"{model.title} on {self.datamodule.full_title}: {devices}, precision {trainer.precision}"
        print(f"{line}; {millions:.1f} M parameters, {weights}{where}", flush=True)

    def _run_subcommand(self, subcommand: str) -> None:
        with self._claimed_folder() as folder, kept(folder):
            self._say_run()
            self._run_explained(subcommand)

    @contextmanager
    def _claimed_folder(self) -> Iterator[Path | None]:
        """Lock the run's folder inside the context, and set the loggers that write to it.

        Yields:
            Folder in the first process. None in the others, which get it when training starts, because a launcher may
            start them before or after the first one.

        Raises:
            RunInUseError: Another process is executing the run to be resumed.
            RecipeError: The folder cannot be created.
        """
        trainer = self.trainer
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = self._run_folder()
            yield folder if trainer.is_global_zero else None
            return
        folder = runs = self._runs()
        with ExitStack() as claim:
            try:
                self.resume_from = self._checkpoint_to_resume(claim)
                if self.resume_from:
                    folder = self.resume_from.parent.parent
                elif trainer.is_global_zero:
                    folder = claim.enter_context(new_run(runs, trainer))
            except OSError as error:
                raise RecipeError(
                    f"results.directory: the run cannot write to {error.filename or runs} ({error.strerror}). Choose "
                    "another folder with --results.directory=FOLDER"
                ) from error
            trainer.run_folder = folder
            if self._get(self.config_init, "trainer", default={}).get("logger") in (None, True):
                board = TensorBoardLogger(runs.parent, runs.name, folder.name, default_hp_metric=False)
                trainer.loggers = [board, *trainer.loggers]
            if self.subcommand == "fit":
                trainer.loggers = [*trainer.loggers, CurvesLogger(folder)]
            yield folder if trainer.is_global_zero else None

    def _run_explained(self, subcommand: str) -> None:
        with warnings.catch_warnings():
            # Evaluation needs no checkpoint callback, regardless of the run that wrote the checkpoint.
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            # A resumed run writes to its existing folder.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            # Lightning's own code triggers this warning.
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            try:
                super()._run_subcommand(subcommand)
            except SIGTERMException as error:  # Lightning would exit with status 0
                raise RunInterruptedError(
                    "The run was stopped by SIGTERM between two steps. Resume it with --checkpoints.resume=true."
                ) from error
            except RuntimeError as error:
                if self.trainer.world_size == 1 or not any(words in str(error) for words in LOST):
                    raise
                raise UserError(
                    f"Another of the {self.trainer.world_size} processes of this run ended "
                    f"({str(error).splitlines()[0]}). Its own message gives the reason, unless it was killed or memory "
                    "ran out. Resume the run with --checkpoints.resume=true."
                ) from error
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                raise RecipeError(
                    f"{error.filename or 'A file of the run'} could not be written ({error.strerror}). Free disk "
                    "space, raise the file size limit (ulimit -f), or choose another folder with results.directory."
                ) from error

    def instantiate_trainer(self, **kwargs: Any) -> RunTrainer:
        """Build the trainer with this project's callbacks; the loggers are set when the run has its folder."""
        trainer = self._get(self.config_init, "trainer", default={})
        fast = bool(trainer.get("fast_dev_run"))
        callbacks: list[Callback] = list(trainer.get("callbacks") or [])
        if trainer.get("enable_progress_bar") is not False:
            callbacks.append(RunProgressBar())
        if trainer.get("enable_model_summary") is not False and is_verbose():
            callbacks.append(RichModelSummary())
        else:
            kwargs["enable_model_summary"] = False
        if self.subcommand == "fit" and not fast:
            callbacks.append(LoaderWatch(compress_command(self.words)))
            if trainer.get("logger") is not False:  # needs a logger
                callbacks.append(LearningRateMonitor("step"))
            if trainer.get("enable_checkpointing") is not False:
                plugins = trainer.get("plugins") or []
                kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
                callbacks.append(RandomState())
                monitor = getattr(self.model, "monitor", MONITOR)
                callbacks.append(WeightsRecord(monitor, self.options.get("seed_everything")))
                # A single callback with save_last writes only if the monitored value has improved. The last weights
                # are written after every epoch, because the last epoch may not be validated.
                callbacks += [
                    RunCheckpoint(
                        monitor=monitor,
                        mode="max",
                        filename="best",
                        enable_version_counter=False,  # overwrites files of a killed run
                    ),
                    RunCheckpoint(
                        monitor="step",
                        mode="max",
                        filename="last",
                        enable_version_counter=False,
                        save_on_train_epoch_end=True,
                    ),
                    SaveRunning(self.options.checkpoints.every_n_steps),
                ]
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)

    def _runs(self) -> Path:
        """Folder of all runs of this method on this dataset, or of all evaluations of a run by one command."""
        directory = self.options.results.directory
        if self.subcommand in EVALUATING and not any(word.startswith("--results") for word in self.words):
            run = run_of(self.options.get("ckpt_path"))
            if run is not None and directory == ResultsConfig.directory:
                return run / str(self.subcommand)
        return Path(directory) / self.run_name

    @property
    def run_name(self) -> str:
        """Name of the folder of all runs of this method on this dataset."""
        return f"{self.model.title}-{type(self.datamodule).__name__}".lower().replace(" ", "-")

    def before_fit(self) -> None:
        """Refuse settings that cannot lead to a results table, and set the checkpoint to resume from."""
        self._check_selection()
        self._check_schedule()
        if self.trainer.is_global_zero:
            sweep_partial(self._runs())
        if self.resume_from:
            self.config_init[self.subcommand]["ckpt_path"] = str(self.resume_from)
        given_path = self.options.get("ckpt_path")
        if given_path and "://" not in given_path and given_path not in CHECKPOINTS:
            read_checkpoint(Path(given_path))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # Checkpoints contain only tensors and plain values; loading runs no code. The run prints its own results table.
        table = {"verbose": is_verbose()} if subcommand in ("validate", "test") else {}
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True, **table}

    def _checkpoint_to_resume(self, claim: ExitStack) -> Path | None:
        """Find the checkpoint for `checkpoints.resume`, and lock the folder of its run.

        Returns:
            None if `checkpoints.resume` is off or no run has these settings.

        Raises:
            RecipeError: A checkpoint is also given.
            RunInUseError: Another process is executing the run.
        """
        if self.subcommand != "fit" or not self.options.checkpoints.resume:
            return None
        if self.options.get("ckpt_path"):
            raise RecipeError("checkpoints.resume finds the checkpoint itself. Drop it or --ckpt_path.")

        def claimed(run: Path) -> bool:  # locks before reading checkpoints
            same = self._same_settings(run)
            if same and self.trainer.is_global_zero:
                claim.enter_context(locked_run(run))
            return same

        found = newest_checkpoint(self._runs(), claimed)
        rank_zero_info(f"Resuming from {found}" if found else "There is no checkpoint to resume; starting a new run")
        return found

    def _same_settings(self, run: Path) -> bool:
        """Return whether a run has the same settings as this one where results depend on them, and log differences."""
        path = run / "config.yaml"
        if not path.is_file():
            rank_zero_info(f"Not resuming {run}: it has no config.yaml with its settings")
            return False
        then = yaml.safe_load(path.read_text(encoding="utf-8"))
        now = plain(self._parser(self.subcommand), self.options)
        changed = list(changed_settings(then, now))
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            rank_zero_info(f"Not resuming {run}, which has other settings: {'; '.join(changed[:3])}{more}")
        return not changed

    def after_fit(self) -> None:
        """Test the selected weights and print the results table."""
        select_on = self.options.results.select_on
        name: Literal["last", "best"] = "last" if select_on == "last" else "best"
        written = [
            c for c in self.trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.filename == name
        ]
        path = written[0].best_model_path if written else None
        if path:
            self._check_written(Path(path), select_on)
        if select_on != "last" and not path:
            raise RecipeError(
                f"results.select_on: {select_on} found no best checkpoint, since no validation has taken place. Test "
                "the last weights with results.select_on: last."
            )
        self.trainer.test(
            self.model, datamodule=self.datamodule, ckpt_path=path or None, verbose=False, weights_only=True
        )
        self._close(path or None, self._fitted(path or None, name))

    def _fitted(self, checkpoint: str | None, name: Literal["last", "best"]) -> Weights:
        """Return a description of the weights that this run selected."""
        if checkpoint is not None:
            found = weights_of(read_checkpoint(Path(checkpoint)))
            select_on = self.options.results.select_on
            return replace(found, kind=name, chosen_on=None if select_on == "last" else select_on)
        if not self.trainer.global_step:
            return starting_weights(self.model, self.options.model.init_args)
        folder = self._run_folder()
        epochs, steps = self.trainer.current_epoch, self.trainer.global_step
        return Weights("last", None if folder is None else str(folder), epochs, steps)

    def before_test(self) -> None:
        """Warn if untrained weights are about to be scored."""
        if self.options.get("ckpt_path") or isinstance(self.model, VideoQuestionAnswering):  # it raises its own error
            return
        weights = starting_weights(self.model, self.options.model.init_args)
        if weights.kind == "untrained" or new_layers(self.model):
            rank_zero_warn(f"{weights.caption()}. To evaluate a trained run, pass its checkpoint with --ckpt_path.")

    before_validate = before_predict = before_test

    def _check_written(self, checkpoint: Path, select_on: SelectOn) -> None:
        """Refuse to test weights that are missing or, for `last`, not from the last step."""
        saved, step = int(read_checkpoint(checkpoint)["global_step"]), self.trainer.global_step
        if select_on == "last" and saved != step:
            raise RecipeError(
                f"{checkpoint} contains the weights of step {saved}, but the run ended at step {step}, so nothing was "
                f"tested. Resume from it with --ckpt_path={checkpoint}"
            )

    def after_test(self) -> None:
        """Print the results table."""
        checkpoint = self.options.get("ckpt_path")
        if checkpoint is None:
            weights = starting_weights(self.model, self.options.model.init_args)
        else:
            weights = Weights("unknown") if self.trained is None else self.trained.weights
        self._close(checkpoint, replace(weights, overridden=[str(item) for item in self.overridden]))

    after_validate = after_test

    def after_predict(self) -> None:
        """Write the best videos of every text as parquet."""
        predictions, folder = self.model.predictions, self._run_folder()
        if predictions is None or not self.trainer.is_global_zero:
            return
        path = (folder or Path(self.options.results.directory)) / "predictions.parquet"
        if isinstance(self.model, VideoQuestionAnswering):
            write_answers(path, predictions)
            Console().print(f"Wrote {path}", highlight=False, soft_wrap=True)
            return
        split = self.datamodule.read_split("test")
        texts, video_ids = [text.text for text in split.texts], [video.video_id for video in split.videos]
        write_predictions(path, texts, video_ids, *predictions)
        Console().print(f"Wrote {path}", highlight=False, soft_wrap=True)

    def _check_selection(self) -> None:
        select_on = self.options.results.select_on
        on_test = self.datamodule.validation == "test"
        if select_on == "val" and on_test:
            raise RecipeError(
                f"results.select_on: val needs a validation split, but {type(self.datamodule).__name__} split "
                f"{self.datamodule.split} validates on its test videos. Set data.init_args.holdout to a number of "
                "training videos, or use results.select_on: last (or test, which is optimistic)."
            )
        trainer = self.trainer
        every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
        never = {
            "trainer.enable_checkpointing: false": not trainer.checkpoint_callbacks,
            f"trainer.limit_val_batches: {trainer.limit_val_batches:g}": not trainer.limit_val_batches,
            f"trainer.check_val_every_n_epoch: {every} and trainer.max_epochs: {epochs}": (
                every is not None and epochs is not None and 0 < epochs < every
            ),
        }
        if select_on != "last" and any(never.values()):
            option = next(option for option, holds in never.items() if holds)
            raise RecipeError(
                f"results.select_on: {select_on} needs a checkpoint of a validation, but {option} writes none. "
                "Change it, or use results.select_on: last."
            )
        if select_on == "test" and not on_test:
            raise RecipeError(
                f"results.select_on: test selects by the validation loop, which here runs on the "
                f"{self.datamodule.validation} validation split. Use results.select_on: val or last."
            )

    def _check_schedule(self) -> None:
        trainer, optimizer = self.trainer, self.model.optimizer_config
        if trainer.max_epochs == -1 and trainer.max_steps == -1 and optimizer.schedule_epochs is None:
            raise RecipeError(
                "The learning rate follows a schedule whose end is unknown, since trainer.max_epochs is -1. Set "
                "model.init_args.optimizer.schedule_epochs to the number of epochs that the schedule spans."
            )

    def _run_folder(self) -> Path | None:
        """Return the run's folder, or None if nothing is saved. It synchronizes, so every process must call it."""
        folder = self.trainer.log_dir
        return Path(folder) if folder else None

    def _close(self, checkpoint: str | None, weights: Weights) -> None:
        folder = self._run_folder()
        if self.model.evaluation is None:
            return
        skipped = self.model.skipped
        if not self.trainer.is_global_zero:
            return
        run: Any = {
            "select_on": weights.select_on,
            "weights": weights,
            "checkpoint": checkpoint,
            "trained_on": trained_on(checkpoint),
            "skipped": skipped,
            "config": plain(self._parser(self.subcommand), self.options),
            "precision": str(self.trainer.precision),
            "seed": self.options.get("seed_everything"),
            "preprocessing": {
                "words_asked": self.datamodule.words,
                "words": self.model.encoder.positions(self.datamodule.words),
                "preparation": self.datamodule.preparation.describe(),
                **({"data": self.datamodule.copies.how.describe()} if self.datamodule.copies is not None else {}),
            },
        }
        if isinstance(self.model, VideoQuestionAnswering):
            paths = self._close_answers(run, folder)
        else:
            results = results_of(self.model.evaluation, method=self.model.title, **run)
            print_results(results)
            paths = write_results(results, folder) if folder else None
            if folder:
                if self.subcommand != "validate":  # the validation split of some datasets is the test split
                    truth = self.datamodule.ground_truth("test").video_of_text
                    write_query_ranks(folder, self.model.evaluation, self.datamodule.read_split("test"), truth)
                write_run_page(folder, results, shlex.join(["tvr", *self.words]))
        if paths:
            Console().print(f"Wrote {paths[0]} and {paths[1].name}", highlight=False, soft_wrap=True)

    def _close_answers(self, run: dict[str, Any], folder: Path | None) -> tuple[Path, Path] | None:
        results = AnswerResults(
            method=f"Question answering with {type(self.model.method).__name__}",
            dataset=self.datamodule.full_title,
            split=self.datamodule.split,
            protocol=self.datamodule.read_split("val" if self.subcommand == "validate" else "test").protocol,
            evaluation=self.model.evaluation,
            learnt_answers=len(self.model.vocabulary),
            warnings=self.datamodule.warnings,
            **run,
        )
        print_results(results)
        return write_results(results, folder) if folder else None


def trained_on(checkpoint: str | None) -> str | None:
    """Return the title of the dataset that a checkpoint file was trained on, or None if it is not recorded."""
    if checkpoint is None or not Path(checkpoint).is_file():
        return None
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    title: str | None = (saved.get(RECORD) or {}).get("trained_on")
    return title


def changed_settings(then: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield a description, with both values, of each changed setting that affects results.

    Args:
        then: Previous configuration as plain dictionaries.
        now: Current configuration as plain dictionaries.
        name: Prefix of the setting names.
    """
    if name in ANYWHERE:
        return
    if name == "model.init_args.evaluation":  # --eval_memory makes the defaults explicit
        then, now = (value or asdict(EvaluationConfig()) for value in (then, now))
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*then, *now]):
            yield from changed_settings(then.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif then != now:
        yield f"{name} was {then}, is {now}"
