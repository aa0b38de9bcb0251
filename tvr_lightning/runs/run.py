"""Run of a recipe by fit, validate, test, or predict: its trainer, folder, resuming, and results."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich import get_console

from tvr_lightning.audit.callback import LeakageAudit
from tvr_lightning.config.check import explained
from tvr_lightning.config.recipe import Recipe, ResultsConfig, recipe_parser, with_defaults
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.config.roles import recipe_roles, roles_of_option
from tvr_lightning.errors import DISK_FULL, UserError, abbreviated
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.files import write_whole
from tvr_lightning.methods.video_qa import VideoQuestionAnswering
from tvr_lightning.option_types import Role
from tvr_lightning.runs import closing, resume
from tvr_lightning.runs.folder import CONFIG, RunTrainer, locked_run, metrics_logger, new_run, run_of
from tvr_lightning.runs.log import is_verbose, tee_log
from tvr_lightning.runs.progress_report import ProgressReport, RunProgressBar
from tvr_lightning.training.callback_checks import AVERAGING
from tvr_lightning.training.checkpoints import read_checkpoint
from tvr_lightning.training.options import changed_options

# Parts of gloo and NCCL errors if another process has ended.
LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Connection was likely closed")


class Run:
    """Run of a recipe, which evaluates or resumes `ckpt_path`; creating it builds everything and writes nothing.

    `words` are the command line for the page of the run, and `callbacks` are added to its own. The `folder` is None in
    processes other than the first, and for a fast_dev_run.
    """

    folder: Path | None = None
    _resume_from: Path | None = None

    def __init__(
        self,
        command: Literal["fit", "validate", "test", "predict"],
        recipe: Recipe,
        ckpt_path: str | None = None,
        words: Sequence[str] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.command = command
        self.recipe = recipe
        self.config = recipe.config
        self.ckpt_path = ckpt_path
        self.words = words
        self.final_metrics: dict[str, Any] = {}
        if command == "fit" and ckpt_path and self.config.checkpoints.resume:
            raise UserError("checkpoints.resume finds the checkpoint itself. Drop it or --ckpt_path.")
        if recipe.changes:
            rank_zero_info("Options that differ from the checkpoint: " + "; ".join(recipe.changes))
        if recipe.dropped:
            rank_zero_info(
                f"Options without effect, since a later recipe replaces their class: {', '.join(recipe.dropped)}"
            )
        for warning in recipe.replaced:
            rank_zero_info(f"Warning: {warning}")
        recipe.check(None if command == "fit" else command)
        built = recipe.build()
        self.model: Any = built.model
        self.model.whole_checkpoints = self.config.checkpoints.whole
        self.datamodule = built.data
        self.datamodule.validates_on_test = command == "fit" and self.config.results.select_on == "test"
        self._trainer_options = vars(built.trainer)
        self.checkpoint_io = resume.AtomicCheckpointIO()
        self._check_trainer_options()
        self.trainer = self.build_trainer(callbacks=callbacks)
        if command == "fit":
            closing.check_selection(self.config.results.select_on, self.datamodule, self.trainer)
            endless = self.trainer.max_epochs == -1 and self.trainer.max_steps == -1
            if endless and self.model.optimizer_config.schedule_epochs is None:
                raise UserError(
                    "The learning rate follows a schedule whose end is unknown, since trainer.max_epochs is -1. Set "
                    "model.init_args.optimizer.schedule_epochs to the number of epochs that the schedule spans."
                )

    def build_trainer(self, callbacks: Sequence[Callback] = ()) -> RunTrainer:
        """Build the trainer with this project's callbacks; the loggers are set when the run has its folder."""
        options = dict(self._trainer_options)
        callbacks = [*_listed(options["callbacks"]), *callbacks, LeakageAudit()]
        terminal = get_console().is_terminal
        if options["enable_progress_bar"] is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            options["enable_progress_bar"] = terminal
            callbacks.append(RunProgressBar() if terminal else ProgressReport())
        options["enable_model_summary"] = options["enable_model_summary"] is not False and is_verbose()
        if self.command == "fit" and not options["fast_dev_run"]:
            if options["logger"] is not False:  # needs a logger
                callbacks.append(LearningRateMonitor("step"))
            if options["enable_checkpointing"] is not False:
                options["plugins"] = [*_listed(options["plugins"]), self.checkpoint_io]
                # A single callback with save_last writes only if the monitored value has improved, and the last epoch
                # may not be validated. Without a version counter, files of a killed run are overwritten.
                checkpoint = partial(resume.RunCheckpoint, mode="max", enable_version_counter=False)
                callbacks += [
                    resume.RandomState(),
                    checkpoint(monitor=self.model.monitor, filename="best"),
                    checkpoint(monitor="step", filename="last", save_on_train_epoch_end=True),
                    resume.SaveRunning(self.config.checkpoints.every_n_steps),
                ]
        logger = False if options["logger"] is True else options["logger"] or False
        with explained():
            trainer = RunTrainer(**options | {"callbacks": callbacks, "logger": logger})
        if options["sync_batchnorm"] and isinstance(trainer.strategy, ModelParallelStrategy):
            raise UserError("trainer.sync_batchnorm has no effect under ModelParallelStrategy. Remove it, or use ddp.")
        return trainer

    def _check_trainer_options(self) -> None:
        """Refuse what Lightning would refuse only because of this project's own settings, or what has no effect."""
        options = self._trainer_options
        if options["barebones"]:
            raise UserError(
                "trainer.barebones disables the checkpoints and logs of a run. To measure raw speed, use "
                "Trainer(barebones=True).fit(model, data) in Python."
            )
        if options["default_root_dir"] is not None:
            raise UserError("trainer.default_root_dir has no effect on a run. Set --results.directory=FOLDER instead.")
        for plugin in _listed(options["plugins"]):
            if isinstance(plugin, CheckpointIO):
                raise UserError(
                    f"trainer.plugins: {type(plugin).__name__} would replace the writer of the run, which writes files "
                    "atomically, and running.ckpt in the background. Remove it."
                )

    def start(self) -> None:
        """Execute the run, and print and write its results; a signal raises RunInterruptedError."""
        with self._claimed_folder() as folder, tee_log(folder) if folder else nullcontext(), self._explained():
            self.folder = folder
            if folder is not None:
                self.checkpoint_io.record = {
                    "run": str(folder),
                    "chosen_on": "test" if self.datamodule.validation == "test" else "val",
                    "monitor": self.model.monitor,
                    "precision": str(self.trainer.precision),
                    "seed": self.config.seed_everything,
                    "trained_on": self.datamodule.full_title,
                    "devices": self.trainer.world_size,
                    "training_set": self.datamodule.training_set,
                }
                options = recipe_parser().dump(self.config, skip_validation=True, skip_unset=False)
                write_whole(folder / CONFIG, options.encode())
            self._print_description()
            if self.command == "fit":
                self._fit()
            else:
                self._evaluate()

    def _print_description(self) -> None:
        """Print one line with the method, device, precision, data, weights, and folder of the run."""
        trainer = self.trainer
        if not trainer.is_global_zero:
            return
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        devices = name if trainer.world_size == 1 else f"{trainer.world_size} x {name}"
        start = closing.starting_weights(self)
        checkpoint = self._resume_from or self.ckpt_path
        weights = f"weights of {checkpoint}" if checkpoint else f"{start.kind}: {start.start}"
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad) / 1e6
        fitted = f"{trained:.2f} M trainable and {size - trained:.2f} M frozen"
        parts = fitted if self.command == "fit" else f"{size:.2f} M"
        where = f"; writes to {trainer.run_folder}" if trainer.run_folder else ""
        line = f"{self.model.title} on {self.datamodule.full_title}: {devices}, precision {trainer.precision}"
        print(f"{line}; {parts} parameters, {weights}{where}", flush=True)

    def _fit(self) -> None:
        trainer = self.trainer
        start = str(self._resume_from) if self._resume_from else self.ckpt_path
        if start:
            read_checkpoint(Path(start))
        # Checkpoints contain only tensors and plain values; loading runs no code.
        trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=start, weights_only=True)
        self.final_metrics |= trainer.callback_metrics
        checkpoint, saved = closing.selected_checkpoint(self.config.results.select_on, trainer)
        if checkpoint:  # when it is loaded, these callbacks would restore the weights of the last step
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, AVERAGING)]
        trainer.test(self.model, datamodule=self.datamodule, ckpt_path=checkpoint, verbose=False, weights_only=True)
        self.final_metrics |= trainer.callback_metrics
        closing.close(self, checkpoint, saved)

    def _evaluate(self) -> None:
        if self.ckpt_path is None and not isinstance(self.model, VideoQuestionAnswering):  # it raises its own error
            weights = closing.starting_weights(self)
            if weights.kind == "untrained" or closing.new_layers(self.model):
                rank_zero_info(f"{weights.caption()}. To evaluate a trained run, pass its checkpoint with --ckpt_path.")
        # The run prints its own results table.
        table = {} if self.command == "predict" else {"verbose": is_verbose()}
        evaluate = getattr(self.trainer, self.command)
        evaluate(self.model, datamodule=self.datamodule, ckpt_path=self.ckpt_path, weights_only=True, **table)
        self.final_metrics |= self.trainer.callback_metrics
        if self.command == "predict":
            closing.write_best_videos(self)
        else:
            closing.close(self, self.ckpt_path, self.recipe.trained.saved if self.recipe.trained else None)

    @contextmanager
    def _claimed_folder(self) -> Iterator[Path | None]:
        """Lock the run's folder inside the context, and set the loggers that write to it.

        Yield the folder in the first process. The others get it when training starts, because a launcher may start them
        before or after the first one.
        """
        trainer = self.trainer
        runs = self._runs()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            yield None
            return
        folder = runs
        with ExitStack() as claim:
            try:
                if self.command == "fit" and self.config.checkpoints.resume:
                    self._resume_from = found = resume.newest_checkpoint(runs, partial(self._resumes, claim))
                    none = "There is no checkpoint to resume; starting a new run"
                    rank_zero_info(f"Resuming from {found}" if found else none)
                if self._resume_from:
                    folder = self._resume_from.parent.parent
                elif trainer.is_global_zero:
                    folder = claim.enter_context(new_run(runs, trainer))
            except OSError as error:
                raise UserError(
                    f"results.directory: the run cannot write to {error.filename or runs} ({error.strerror}). Choose "
                    "another folder with --results.directory=FOLDER"
                ) from error
            trainer.run_folder = folder
            if self.config.trainer.logger in (None, True):
                board = TensorBoardLogger(runs.parent, runs.name, folder.name, default_hp_metric=False)
                trainer.loggers = [board, *trainer.loggers]
            if self.command == "fit":
                trainer.loggers = [*trainer.loggers, metrics_logger(folder, self._resume_from)]
            yield folder if trainer.is_global_zero else None

    def _runs(self) -> Path:
        """Return the folder of all runs of this method on this dataset, or of this command's evaluations of a run."""
        directory = self.config.results.directory
        given = directory != ResultsConfig.directory or any(word.startswith("--results") for word in self.words)
        run = None if self.command == "fit" or given else run_of(self.ckpt_path)
        name = f"{self.model.title}-{type(self.datamodule).__name__}".lower().replace(" ", "-")
        return Path(directory) / name if run is None else run / self.command

    def _resumes(self, claim: ExitStack, run: Path) -> bool:
        """Return whether a run has the same settings where results depend on them; if so, lock it, else log why."""
        file = run / CONFIG
        before = read_recipe(file) if file.is_file() else {}
        now = self.recipe.plain()
        for options in (before, now):
            method = options.get("model", {}).get("init_args", {})
            if "evaluation" in method:  # a memory budget makes the defaults explicit
                method["evaluation"] = method["evaluation"] or asdict(EvaluationConfig())
        before = with_defaults(before, now)
        roles = recipe_roles(now)
        changed = [
            f"{name} was {value}, is {other}"
            for section in before | now
            for name, value, other in changed_options(section, before.get(section), now.get(section))
            if Role.MACHINE not in roles_of_option(roles, name)
        ]
        if changed:
            rank_zero_info(f"Not resuming {run}, which has other settings: {abbreviated(changed, 3, '; ')}")
        elif self.trainer.is_global_zero:
            claim.enter_context(locked_run(run))
        return not changed

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except SIGTERMException as error:  # Lightning would exit with status 0
            raise resume.RunInterruptedError(
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
            if error.errno not in DISK_FULL:
                raise
            raise UserError(
                f"{error.filename or 'A file of the run'} could not be written ({error.strerror}). Free disk "
                "space, raise the file size limit (ulimit -f), or choose another folder with results.directory."
            ) from error


def _listed(value: Any) -> list[Any]:
    given = value if isinstance(value, list) else [value]
    return [item for item in given if item is not None]
