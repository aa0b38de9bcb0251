"""From recipe files to a method, its data and a run: LightningCLI in subclass mode, and `from_recipe` for Python."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichModelSummary
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

import tvr_lightning.data
import tvr_lightning.encoders
import tvr_lightning.evaluation.two_stage
import tvr_lightning.methods  # recipes name classes by their bare names once these are imported
from tvr_lightning.checkpoints import CheckpointError, read_checkpoint
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.errors import UserError, check_present
from tvr_lightning.evaluation.answers import (
    AnswerResults,
    print_answer_results,
    write_answer_results,
    write_answers,
)
from tvr_lightning.evaluation.config import EvaluationConfig, gibibytes
from tvr_lightning.evaluation.predictions import write_predictions
from tvr_lightning.evaluation.results import SelectOn, print_results, results_of, write_results
from tvr_lightning.evaluation.weights import Weights, weights_of
from tvr_lightning.explain import Arguments, explain, refusals, sources_of
from tvr_lightning.media.preparation import PREPARATION
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.video_qa import VideoQuestionAnswering
from tvr_lightning.quiet import is_verbose
from tvr_lightning.recipe_files import RecipeError, read_recipe, with_recipes_found
from tvr_lightning.run_page import write_query_ranks, write_run_page
from tvr_lightning.trained import Difference, Trained, WeightsRecord, given, new_layers, starting_weights
from tvr_lightning.training.bar import RunProgressBar
from tvr_lightning.training.module import RecipeModule
from tvr_lightning.training.reliability import (
    AtomicCheckpointIO,
    CheckpointConfig,
    ProcessLostError,
    RandomState,
    RunCheckpoint,
    RunInterruptedError,
    SaveRunning,
    newest_checkpoint,
    sweep_partial,
)
from tvr_lightning.training.run_folder import RunTrainer, next_run
from tvr_lightning.training.waiting import LoaderWatch, compress_command

MONITOR = "val/t2v_R@1"
EVALUATING = ("validate", "test", "predict")
# What gloo and NCCL say of a process that is gone.
LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Connection was likely closed")
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# Where and how a run is carried out and what becomes of it: a run that goes on may change it.
ANYWHERE = {
    "ckpt_path", "checkpoints", "results", "eval_memory", "weights_only", "data.init_args.root",
    "data.init_args.num_workers", "trainer.accelerator", "trainer.strategy", "trainer.devices", "trainer.num_nodes",
    "trainer.logger", "trainer.log_every_n_steps", "trainer.enable_progress_bar", "trainer.enable_model_summary",
    "trainer.default_root_dir", "trainer.profiler", "trainer.limit_test_batches",
    "model.init_args.evaluation.memory_gib",
}  # fmt: skip


@dataclass
class ResultsConfig:
    """Where results go and how the weights behind them are chosen.

    Attributes:
        directory: parent folder of the runs; a run writes to <directory>/<method>-<dataset>/version_<n>.
        select_on: which weights make the table after `fit`: those of the last step, or the best on the validation or
            test split. The papers' code selects on the test set, which is optimistic; the choice is recorded.
    """

    directory: str = "runs"
    select_on: SelectOn = "last"


class RecipeCLI(LightningCLI):
    """LightningCLI in subclass mode for recipes: links, callbacks, logger, and the table that closes a run."""

    trainer: RunTrainer

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        super().__init__(
            LightningModule,  # a RetrievalModule, or VideoQuestionAnswering
            TextVideoDataModule,
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
            trainer_class=RunTrainer,
            trainer_defaults={"use_distributed_sampler": False, "num_sanity_val_steps": 0},
            seed_everything_default=0,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=args,
            run=run,
            auto_configure_optimizers=False,
            parser_kwargs={name: {"exit_on_error": False} for name in self.subcommands()} | {"exit_on_error": False},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `results` and `checkpoints`, and tie what model and data must agree on."""
        parser.add_argument("--results", type=ResultsConfig, default=ResultsConfig())
        parser.add_argument("--checkpoints", type=CheckpointConfig, default=CheckpointConfig())
        short = "short for model.init_args.evaluation.memory_gib, which it overrides: a size such as 4GiB"
        parser.add_argument("--eval-memory", type=str | None, default=None, help=short)
        parser.link_arguments("data.init_args.words", "model.init_args.words")
        parser.link_arguments("data.init_args.frames", "model.init_args.frames")
        # Question answering holds a method; links to arguments that a class does not have are left out.
        parser.link_arguments("data.init_args.words", "model.init_args.method.init_args.words")
        parser.link_arguments("data.init_args.frames", "model.init_args.method.init_args.frames")
        for name in PREPARATION:
            parser.link_arguments(f"model.{name}", f"data.init_args.{name}", apply_on="instantiate")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand in EVALUATING:
            override = "score with the options given here where the checkpoint was trained with others"
            parser.add_argument("--override", action="store_true", help=override)
            trust = "module whose classes the checkpoint may name and build besides this package's"
            parser.add_argument("--trust", type=str, action="append", help=trust)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse `args`, or the command line where `args` is None; on top of the checkpoint that is to be evaluated.

        Raises:
            RecipeError: a recipe is not there, or is none.
            CheckpointError: there is no such checkpoint, or it cannot be built from.
        """
        self.trained: Trained | None = None
        self.overridden: list[Difference] = []
        assert args is None or isinstance(args, list)
        self.words = sys.argv[1:] if args is None else args
        words = with_recipes_found(self.words)
        asked = _without_nulls(words)
        checkpoint = given(words[1:], "ckpt_path") if words and words[0] in EVALUATING else []
        local = bool(checkpoint) and "://" not in checkpoint[-1] and checkpoint[-1] != "null"
        if local and not Path(checkpoint[-1]).is_dir():  # shards of a strategy, which Lightning alone can read
            self.trained = Trained(Path(checkpoint[-1]), words[1:], given(words[1:], "trust"))
            asked = [asked[0], f"--config={json.dumps(self.trained.recipe())}", *asked[1:]]
        with warnings.catch_warnings():
            # Tests and Python users pass a list while their own program has a command line too.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within")
            try:
                super().parse_arguments(parser, asked)
            except ArgumentError as error:
                verb = asked[0] if asked and asked[0] in self.subcommands() else None
                known = dict.fromkeys((action.dest.partition(".")[0] for action in self._parser(verb)._actions), Any)
                raise OptionError(explain(sources_of(asked), known | SECTIONS) or refusals(str(error))) from error

    def _parse_ckpt_path(self) -> None:
        # The command line decides; a checkpoint must not change the configuration silently (LightningCLI would let it).
        # Whether the tensors fit is checked when the weights are loaded.
        if self.trained is None:
            return
        options = self.config[self.config.subcommand]
        differences = self.trained.differences(options)
        scored = [item for item in differences if item.scored]
        if scored and not options.override:
            raise CheckpointError(
                f"{self.trained.path} was trained with other options than these, and they change its scores:\n"
                + "".join(f"  - {item}\n" for item in scored)
                + "Leave them out, and the checkpoint's hold; or score with these all the same: --override"
            )
        self.overridden = scored
        if differences:
            rank_zero_info("Set otherwise than the checkpoint: " + "; ".join(map(str, differences)))

    def _say_run(self) -> None:
        """Print one line: what runs, where, how precisely, on which data, from which weights, and into which folder."""
        trainer, model = self.trainer, self.model
        folder = trainer.log_dir  # asks every process
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
        line = f"{model.title} on {self.datamodule.title}: {devices}, precision {trainer.precision}; {millions:.1f} M "
        print(f"{line}parameters, {weights}{where}", flush=True)

    def _run_subcommand(self, subcommand: str) -> None:
        self._say_run()
        with warnings.catch_warnings():
            # Evaluation needs no checkpoint callback, whatever the run that wrote the checkpoint had.
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            # A run that goes on writes into its own folder.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            # Raised by Lightning about its own code.
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            try:
                super()._run_subcommand(subcommand)
            except SIGTERMException as error:  # Lightning's own way out, which would end with status 0
                raise RunInterruptedError(
                    "stopped by SIGTERM between two steps; go on with --checkpoints.resume=true"
                ) from error
            except RuntimeError as error:
                if self.trainer.world_size == 1 or not any(words in str(error) for words in LOST):
                    raise
                raise ProcessLostError(
                    f"another of the {self.trainer.world_size} processes of this run ended "
                    f"({str(error).splitlines()[0]}). It said why, unless it was killed or memory ran out. Go on with "
                    "--checkpoints.resume=true"
                ) from error
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                raise RecipeError(
                    f"{error.filename or 'a file of the run'} could not be written ({error.strerror}); make room on "
                    "the disk, raise the limit of ulimit -f, or choose another place with results.directory"
                ) from error

    @property
    def options(self) -> Namespace:
        """The parsed configuration of the running verb."""
        return self.config[self.subcommand] if self.subcommand else self.config

    def before_instantiate_classes(self) -> None:
        """Stop before anything heavy where data or weights are missing, and say all of it at once."""
        self._set_memory(self.options.eval_memory)
        self.check_present([instantiate_data(self.options.data).check_present])

    def check_present(self, checks: list[Callable[[], object]]) -> None:
        """Stop where the encoders' weights are missing, or what other checks look for.

        Raises:
            MissingAssetError: says all of it at once.
            RecipeError: an option names what cannot be.
        """
        model = self.options.model
        try:
            check_present([*checks, *_required_files(model, model.init_args.encoder)])
        except ValueError as error:  # weights that no architecture of that name has
            raise error if isinstance(error, UserError) else RecipeError(refusals(str(error))) from error

    def _set_memory(self, size: str | None) -> None:
        if size is None:
            return
        method = self.options.model.init_args
        if "evaluation" not in method:
            raise RecipeError("--eval-memory is for retrieval; answering questions scores no pairs")
        try:
            budget = gibibytes(size)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        method.evaluation = method.evaluation or Namespace(asdict(EvaluationConfig()))
        method.evaluation.memory_gib = budget

    def instantiate_classes(self) -> None:
        """Build model, data and trainer; options that conflict end in one sentence."""
        try:
            super().instantiate_classes()
            trainer = self.trainer
            self.model.encoder.check_precision(str(trainer.precision), type(trainer.strategy).__name__)
        except (ValueError, TypeError) as error:
            raise RecipeError(refusals(str(error))) from error

    def instantiate_trainer(self, **kwargs: Any) -> RunTrainer:
        """Build the trainer with this project's callbacks and, unless the recipe names one, a TensorBoard logger.

        Whatever logger it is, the run's own files go to results.directory.
        """
        trainer = self._get(self.config_init, "trainer", default={})
        fast = bool(trainer.get("fast_dev_run"))
        runs = self._runs()
        # A run that goes on does so in its own folder.
        folder = self.resume_from.parent.parent if self.resume_from else next_run(runs)
        if trainer.get("logger") in (None, True) and not fast:
            kwargs["logger"] = TensorBoardLogger(runs.parent, runs.name, folder.name, default_hp_metric=False)
        callbacks: list[Callback] = list(trainer.get("callbacks") or [])
        if trainer.get("enable_progress_bar") is not False:
            callbacks.append(RunProgressBar())
        if trainer.get("enable_model_summary") is not False and is_verbose():
            callbacks.append(RichModelSummary())
        else:
            kwargs["enable_model_summary"] = False
        if self.subcommand == "fit" and not fast:
            callbacks.append(LoaderWatch(compress_command(self.words)))
            if trainer.get("logger") is not False:  # to which it would log
                callbacks.append(LearningRateMonitor("step"))
            if trainer.get("enable_checkpointing") is not False:
                plugins = trainer.get("plugins") or []
                kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
                callbacks.append(RandomState())
                monitor = getattr(self.model, "monitor", MONITOR)
                callbacks.append(WeightsRecord(monitor, self.options.get("seed_everything")))
                # Not one callback with save_last, which writes only when the monitored value has improved. The last
                # weights are written after every epoch, for the last epoch need not be validated.
                checkpoints = folder / "checkpoints"
                callbacks += [
                    RunCheckpoint(
                        checkpoints,
                        monitor=monitor,
                        mode="max",
                        filename="best",
                        enable_version_counter=False,  # what a killed run left is written again
                    ),
                    RunCheckpoint(
                        checkpoints,
                        monitor="step",
                        mode="max",
                        filename="last",
                        enable_version_counter=False,
                        save_on_train_epoch_end=True,
                    ),
                    SaveRunning(self.options.checkpoints.every_n_steps),
                ]
        made = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        assert isinstance(made, RunTrainer)
        made.run_folder = None if fast else folder
        return made

    def _runs(self) -> Path:
        """Folder of all runs of this method on this dataset."""
        return Path(self.options.results.directory) / self.run_name

    @property
    def run_name(self) -> str:
        """Name of the folder of all runs of this method on this dataset."""
        return f"{self.model.title}-{type(self.datamodule).__name__}".lower().replace(" ", "-")

    def before_fit(self) -> None:
        """Refuse what could not end in a table; find the checkpoint to go on from."""
        self._check_selection()
        self._check_writable()
        if self.trainer.is_global_zero:
            sweep_partial(self._runs())
        if self.resume_from:
            self.config_init[self.subcommand]["ckpt_path"] = str(self.resume_from)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # Checkpoints hold tensors and plain values; none may execute code. The table is this project's own.
        table = {"verbose": is_verbose()} if subcommand in ("validate", "test") else {}
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True, **table}

    @cached_property
    def resume_from(self) -> Path | None:
        """The checkpoint that `checkpoints.resume` goes on from; None where it is off or no run has these settings.

        Raises:
            RecipeError: a checkpoint is given, too.
        """
        if self.subcommand != "fit" or not self.options.checkpoints.resume:
            return None
        if self.options.get("ckpt_path"):
            raise RecipeError("checkpoints.resume looks for the checkpoint itself; drop it or --ckpt_path")
        found = newest_checkpoint(self._runs(), self._same_settings)
        rank_zero_info(f"Going on from {found}" if found else "No checkpoint to go on from; starting at the beginning")
        return found

    def _same_settings(self, run: Path) -> bool:
        """Whether a run was made with the settings that its numbers depend on; says where it was not."""
        path = run / "config.yaml"
        if not path.is_file():
            rank_zero_info(f"Not going on in {run}: it has no config.yaml that tells its settings")
            return False
        then = yaml.safe_load(path.read_text(encoding="utf-8"))
        now = plain(self._parser(self.subcommand), self.options)
        changed = list(changed_settings(then, now))
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            rank_zero_info(f"Not going on in {run}, which has other settings: {'; '.join(changed[:3])}{more}")
        return not changed

    def after_fit(self) -> None:
        """Test the selected weights and close with the table."""
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
                f"results.select_on: {select_on} found no best checkpoint: keep validation and checkpoints on"
            )
        self.trainer.test(
            self.model, datamodule=self.datamodule, ckpt_path=path or None, verbose=False, weights_only=True
        )
        self._close(path or None, self._fitted(path or None, name))

    def _fitted(self, checkpoint: str | None, name: Literal["last", "best"]) -> Weights:
        """What the run that ends here chose."""
        if checkpoint is not None:
            found = weights_of(read_checkpoint(Path(checkpoint)) if Path(checkpoint).is_file() else {})
            select_on = self.options.results.select_on
            # Saved by an earlier version, or as a folder of shards: this run knows what it chose.
            return replace(found, kind=name, chosen_on=None if select_on == "last" else select_on)
        if not self.trainer.global_step:
            return starting_weights(self.model, self.options.model.init_args)
        folder = self._run_folder()
        epochs, steps = self.trainer.current_epoch, self.trainer.global_step
        return Weights("last", None if folder is None else str(folder), epochs, steps)

    def before_test(self) -> None:
        """Warn where untrained weights are about to be scored."""
        if self.options.get("ckpt_path") or isinstance(self.model, VideoQuestionAnswering):  # which refuses to answer
            return
        weights = starting_weights(self.model, self.options.model.init_args)
        if weights.kind == "untrained" or new_layers(self.model):
            rank_zero_warn(f"{weights.caption()}; name the checkpoint of a run with --ckpt_path")

    before_validate = before_predict = before_test

    def _check_written(self, checkpoint: Path, select_on: SelectOn) -> None:
        """Refuse to test weights that are gone, or as those of the last step others."""
        saved, step = int(read_checkpoint(checkpoint)["global_step"]), self.trainer.global_step
        if select_on == "last" and saved != step:
            raise RecipeError(
                f"{checkpoint} holds the weights of step {saved}, but the run ended at step {step}; nothing was "
                f"tested. Go on from it with --ckpt_path={checkpoint}"
            )

    def after_test(self) -> None:
        """Close with the table."""
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
                f"results.select_on: val needs a validation split, and {type(self.datamodule).__name__} split "
                f"{self.datamodule.split} validates on its test videos; set data.init_args.holdout to a number of "
                "training videos, or choose results.select_on: last (or test, which is optimistic)"
            )
        if select_on == "test" and not on_test:
            raise RecipeError(
                f"results.select_on: test chooses by the validation loop, which here runs on the "
                f"{self.datamodule.validation} validation split; choose results.select_on: val or last"
            )

    def _check_writable(self) -> None:
        """Refuse a folder that takes no files before the first epoch is lost."""
        if self.trainer.run_folder is None:  # nothing is kept
            return
        folder = self.resume_from.parent if self.resume_from else self._runs()
        present = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if not present.is_dir() or not os.access(present, os.W_OK | os.X_OK):
            raise RecipeError(
                f"results.directory: the run cannot write to {folder}, since {present} "
                f"{'is read-only' if present.is_dir() else 'is a file'}; choose another with --results.directory=FOLDER"
            )

    def _run_folder(self) -> Path | None:
        """The run's folder, None where nothing is kept; asks every process, so that none may have left."""
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
            "read_as": {
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
                if self.subcommand != "validate":  # whose split is the test's with some datasets
                    truth = self.datamodule.ground_truth("test").video_of_text
                    write_query_ranks(folder, self.model.evaluation, self.datamodule.read_split("test"), truth)
                write_run_page(folder, results, shlex.join(["tvr", *self.words]))
        if paths:
            Console().print(f"Wrote {paths[0]} and {paths[1].name}", highlight=False, soft_wrap=True)

    def _close_answers(self, run: dict[str, Any], folder: Path | None) -> tuple[Path, Path] | None:
        results = AnswerResults(
            method=f"Question answering with {type(self.model.method).__name__}",
            dataset=self.datamodule.title,
            split=self.datamodule.split,
            protocol=self.datamodule.read_split("val" if self.subcommand == "validate" else "test").protocol,
            evaluation=self.model.evaluation,
            learnt_answers=len(self.model.vocabulary),
            **run,
        )
        print_answer_results(results)
        return write_answer_results(results, folder) if folder else None


class OptionError(RecipeError):
    """A class or an option does not exist, or a value is of another type; names what there is, nearest first."""

    exit_status = 2  # as argparse ends


SECTIONS = {
    "model": RecipeModule,
    "data": TextVideoDataModule,
    "trainer": Arguments(Trainer),
    "results": ResultsConfig,
    "checkpoints": CheckpointConfig,
}
"""What the sections of a recipe hold."""


def trained_on(checkpoint: str | None) -> str | None:
    """Return the dataset that a checkpoint says it was trained on, as results name it; None where it does not say.

    Converted checkpoints of the authors do not.

    Args:
        checkpoint: file, or None without one.
    """
    if checkpoint is None or not Path(checkpoint).is_file():
        return None
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    name = str(saved.get("datamodule_hyper_parameters", {}).get("_class_path", "")).rpartition(".")[2]
    kind = getattr(tvr_lightning.data, name, None) if name in tvr_lightning.data.__all__ else None
    return kind.title if kind is not None else None


def plain(parser: ArgumentParser, config: Namespace) -> dict[str, Any]:
    """Return a parsed configuration as plain dictionaries, lists, strings and numbers."""
    # Nulls too: left out, a recipe's null would read as the default.
    return yaml.safe_load(parser.dump(config, skip_validation=True, skip_unset=False))


def changed_settings(then: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield the settings that differ and on which the numbers of a run depend, each with both values.

    Args:
        then, now: configurations as plain dictionaries.
        name: where in the configuration they stand.
    """
    if name in ANYWHERE:
        return
    if name == "model.init_args.evaluation":  # --eval-memory makes the defaults explicit
        then, now = (value or asdict(EvaluationConfig()) for value in (then, now))
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*then, *now]):
            yield from changed_settings(then.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif then != now:
        yield f"{name} was {then}, is {now}"


def instantiate_data(config: Namespace) -> TextVideoDataModule:
    """Build only the DataModule of a parsed recipe."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(TextVideoDataModule, "data")
    values = config.as_dict() if isinstance(config, Namespace) else config
    return parser.instantiate(parser.parse_object({"data": values})).data


def parse_recipe(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> RecipeCLI:
    """Parse recipes and instantiate model and data; the returned object has `.model`, `.datamodule`, `.config`.

    Args:
        paths: recipe files or names of this project's recipes, later ones on top of earlier ones.
        overrides: command-line style, such as `--data.init_args.batch_size=32`.
    """
    args = [item for path in paths for item in ("--config", str(path))]
    return RecipeCLI(args=[*args, *overrides], run=False)


def from_recipe(
    paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()
) -> tuple[RetrievalModule, TextVideoDataModule]:
    """Build method and data from recipe files, for use in Python.

    Args:
        paths: one recipe file or several, later ones on top of earlier ones.
        overrides: command-line style, such as `--data.init_args.batch_size=32`.

    Raises:
        MissingAssetError: data or weights are not where the recipe looks for them.
        RecipeError: options are out of range or conflict.
    """
    cli = parse_recipe([paths] if isinstance(paths, (str, Path)) else paths, overrides)
    return cli.model, cli.datamodule


def _without_nulls(words: Sequence[str]) -> list[str]:
    """Write `--a.init_args.b=null` as the recipe that says so: of a class within a class the parser makes "None"."""
    found: list[str] = []
    for word in words:
        option, _, value = word.partition("=")
        if found and word == "null" and re.fullmatch(r"--[\w.]+\.init_args\.[\w.]+", found[-1]):
            option, value = found.pop(), word
        if value == "null" and re.fullmatch(r"--[\w.]+\.init_args\.[\w.]+", option):
            inner: Any = None
            for key in reversed(option[2:].split(".")):
                inner = {key: inner}
            word = f"--config={json.dumps(inner)}"
        found.append(word)
    return found


def data_from_recipe(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> TextVideoDataModule:
    """Build only the data of recipe files; they may be data overlays without a method.

    Args:
        paths: one or several recipe files, later ones on top of earlier ones.
        overrides: command-line style, such as `--data.init_args.batch_size=32`.
    """
    sections = [(f"--config {path}", {"data": read_recipe(path).get("data") or {}}) for path in paths]
    merged: dict[str, Any] = {}
    for _, section in sections:
        merged = _overlay(merged, section)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(TextVideoDataModule, "data")
    try:
        config = parser.parse_args(list(overrides), namespace=parser.parse_object(merged))
    except ArgumentError as error:
        raise OptionError(explain([*sections, *sources_of(overrides)], SECTIONS) or refusals(str(error))) from error
    return parser.instantiate(config).data


def _overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    joined = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(joined.get(key), dict)
        joined[key] = _overlay(joined[key], value) if both else value
    return joined


def _required_files(section: Namespace, encoder: Namespace) -> Iterator[Callable[[], object]]:
    """Yield what looks for the files that a class, and the classes among its options, say they need.

    Args:
        section: class_path and init_args.
        encoder: that of the model, which methods within it are built on.
    """
    options = section.get("init_args") or Namespace()
    module, _, name = section.class_path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    if hasattr(kind, "required_files"):
        yield partial(kind.required_files, **{"encoder": encoder, **vars(options)})
    for value in vars(options).values():
        if isinstance(value, Namespace) and "class_path" in value:
            yield from _required_files(value, encoder)
