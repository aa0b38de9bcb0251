"""Method and data from recipe files: LightningCLI in subclass mode, and `from_recipe` for Python."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info

import tvr_lightning.encoders
import tvr_lightning.evaluation.two_stage
import tvr_lightning.methods
import tvr_lightning.training.tf32  # noqa: F401  recipes name classes by their bare names once these are imported
from tvr_lightning import data as datasets
from tvr_lightning.config.check import check_options, refusals, sources_of
from tvr_lightning.config.recipe_files import (
    EVALUATING,
    OptionError,
    RecipeError,
    find_recipe,
    nothing_to_run,
    read_recipe,
    recipes_first,
    with_recipes_found,
)
from tvr_lightning.config.schema import cached_schema, generate, keep
from tvr_lightning.config.trained import Difference, Trained, given
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.encoders.pretrained import weights_follow
from tvr_lightning.errors import UserError, check_present
from tvr_lightning.evaluation.config import EvaluationConfig, gibibytes
from tvr_lightning.evaluation.results import SelectOn
from tvr_lightning.media.preparation import PREPARATION
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.runs.folder import RunTrainer
from tvr_lightning.runs.resume import CheckpointConfig
from tvr_lightning.training.checkpoints import CheckpointError
from tvr_lightning.training.module import check_precision

datasets.import_all()


@dataclass
class ResultsConfig:
    """Settings for the folder of results and the selection of the evaluated weights.

    Attributes:
        directory: Parent folder of the runs; a run writes to <directory>/<method>-<dataset>/version_<n>. By default,
            evaluating a run's checkpoint writes to <command>/version_<n> in the folder of that run.
        select_on: Weights for the table after `fit`: those of the last step, or the best on the validation or test
            split. The papers' code selects on the test set, which is optimistic; the choice is recorded.
    """

    directory: str = "runs"
    select_on: SelectOn = "last"


class RecipeCLI(LightningCLI):
    """LightningCLI in subclass mode for recipes, which defines their sections and consistency; `run.py` runs them."""

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
        """Add `results` and `checkpoints`, and link options that model and data share."""
        parser.add_argument("--results", type=ResultsConfig, default=ResultsConfig())
        parser.add_argument("--checkpoints", type=CheckpointConfig, default=CheckpointConfig())
        short = "memory budget for scoring, such as 4GiB; overrides model.init_args.evaluation.memory_gib"
        parser.add_argument("--eval_memory", type=str | None, default=None, help=short)
        parser.link_arguments("data.init_args.words", "model.init_args.words")
        parser.link_arguments("data.init_args.frames", "model.init_args.frames")
        # For question answering, the options are those of a nested method; links to missing arguments are skipped.
        parser.link_arguments("data.init_args.words", "model.init_args.method.init_args.words")
        parser.link_arguments("data.init_args.frames", "model.init_args.method.init_args.frames")
        for name in PREPARATION:
            parser.link_arguments(f"model.{name}", f"data.init_args.{name}", apply_on="instantiate")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand in EVALUATING:
            override = "score with these options even if the checkpoint was trained with others"
            parser.add_argument("--override", action="store_true", help=override)
            trust = "module whose classes the checkpoint may use, in addition to this package's; can be repeated"
            parser.add_argument("--trust", type=str, action="append", help=trust)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse `args`, or the command line if it is None, on top of the options of the checkpoint to be evaluated.

        Raises:
            RecipeError: A recipe does not exist or is invalid.
            CheckpointError: The checkpoint does not exist, or the model cannot be built from it.
        """
        self.trained: Trained | None = None
        self.overridden: list[Difference] = []
        assert args is None or isinstance(args, list)
        self.words = sys.argv[1:] if args is None else args
        words = recipes_first(with_recipes_found(self.words))
        asked = _without_nulls(words)
        checkpoint = given(words[1:], "ckpt_path") if words and words[0] in EVALUATING else []
        local = bool(checkpoint) and "://" not in checkpoint[-1] and checkpoint[-1] != "null"
        if local:
            self.trained = Trained(Path(checkpoint[-1]), words[1:], given(words[1:], "trust"))
            asked = [asked[0], f"--config={json.dumps(self.trained.recipe())}", *asked[1:]]
        with warnings.catch_warnings():
            # Tests and Python users pass a list while their own program also has a command line.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within")
            try:
                super().parse_arguments(parser, asked)
            except ArgumentError as error:
                verb = asked[0] if asked and asked[0] in self.subcommands() else None
                if "arguments are required" in str(error) and verb is not None:
                    raise nothing_to_run(verb) from error
                schema = generate(self._parser(verb))
                keep(schema)
                check_options(sources_of(asked), schema, import_modules=True)
                raise OptionError(refusals(str(error))) from error
        if cached_schema() is None:
            keep(generate(self._parser(self.config.get("subcommand"))))

    def _parse_ckpt_path(self) -> None:
        # The command line has priority; a checkpoint must not change the configuration silently, as in LightningCLI.
        # Shapes of the tensors are checked when the weights are loaded.
        if self.trained is None:
            return
        options = self.config[self.config.subcommand]
        differences = self.trained.differences(options)
        scored = [item for item in differences if item.scored]
        if scored and not options.override:
            raise CheckpointError(
                f"{self.trained.path} was trained with other options, and the given ones change its scores:\n"
                + "".join(f"  - {item}\n" for item in scored)
                + "Omit them to use the checkpoint's options, or add --override to score with them anyway."
            )
        self.overridden = scored
        if differences:
            rank_zero_info("Options that differ from the checkpoint: " + "; ".join(map(str, differences)))

    @property
    def options(self) -> Namespace:
        """Parsed configuration of the current command."""
        return self.config[self.subcommand] if self.subcommand else self.config

    def before_instantiate_classes(self) -> None:
        """Check the precision, then list all missing data and weights, before anything is loaded."""
        self.check_trainer()
        self._set_memory(self.options.eval_memory)
        try:
            data = instantiate_data(self.options.data)
        except ValueError as error:
            raise error if isinstance(error, UserError) else RecipeError(refusals(str(error))) from error
        evaluation = self.options.model.init_args.get("evaluation")
        # A normalization may use queries of the training split.
        normalized = evaluation is not None and evaluation.normalization is not None
        stage = self.subcommand if self.subcommand in EVALUATING and not normalized else None
        with self._checkpoint_follows():
            self.check_present([partial(data.check_present, stage)])

    def check_trainer(self) -> None:
        """Refuse a precision or strategy that the method or the encoder does not support, before anything is loaded.

        Raises:
            OptionError: The precision or strategy is not supported.
        """
        trainer, model = self.options.trainer, self.options.model.init_args
        precision, strategy = str(trainer.precision or "32-true"), trainer.strategy
        check_precision(precision)
        encoder = model.encoder if "encoder" in model else model.method.init_args.encoder
        module, _, name = encoder.class_path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        named = strategy if isinstance(strategy, str) else str(strategy.class_path)
        shards = Namespace() if isinstance(strategy, str) else strategy.get("init_args") or Namespace()
        if shards.get("save_distributed_checkpoint") or shards.get("state_dict_type") == "sharded":
            raise OptionError(
                "trainer.strategy: a checkpoint of shards cannot be read without running code from it. Set "
                "save_distributed_checkpoint: false (or state_dict_type: full)."
            )
        try:
            kind.check_trainer(precision, named, **vars(encoder.get("init_args") or Namespace()))
        except ValueError as error:
            raise error if isinstance(error, UserError) else OptionError(str(error)) from error

    def _checkpoint_follows(self) -> AbstractContextManager[None]:
        """Return the context for building encoders: if a checkpoint is evaluated, it replaces their weights."""
        return nullcontext() if self.trained is None else weights_follow()

    def check_present(self, checks: list[Callable[[], object]]) -> None:
        """Check that the encoders' weights exist, and run other checks.

        Raises:
            MissingAssetError: Files are missing; the message lists all of them.
            RecipeError: An option has an impossible value.
        """
        model = self.options.model
        try:
            check_present([*checks, *_required_files(model, model.init_args.encoder)])
        except ValueError as error:  # weights that do not exist for this architecture
            raise error if isinstance(error, UserError) else RecipeError(refusals(str(error))) from error

    def _set_memory(self, size: str | None) -> None:
        if size is None:
            return
        method = self.options.model.init_args
        if "evaluation" not in method:
            raise RecipeError("--eval_memory supports retrieval methods only; question answering does not score pairs")
        try:
            budget = gibibytes(size)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        method.evaluation = method.evaluation or Namespace(asdict(EvaluationConfig()))
        method.evaluation.memory_gib = budget

    def instantiate_trainer(self, **kwargs: Any) -> RunTrainer:
        """Build a trainer that reports device and precision, and by default logs nothing."""
        if self._get(self.config_init, "trainer", default={}).get("logger") in (None, True):
            kwargs.setdefault("logger", False)
        made = super().instantiate_trainer(**kwargs)
        assert isinstance(made, RunTrainer)
        return made

    def instantiate_classes(self) -> None:
        """Build model, data and trainer; conflicting options give a one-line error."""
        try:
            with self._checkpoint_follows():
                super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise RecipeError(refusals(str(error))) from error


def plain(parser: ArgumentParser, config: Namespace) -> dict[str, Any]:
    """Return a parsed configuration as plain dictionaries, lists, strings and numbers."""
    # Nulls are kept, because a missing value would mean the default.
    return yaml.safe_load(parser.dump(config, skip_validation=True, skip_unset=False))


def instantiate_data(config: Namespace) -> TextVideoDataModule:
    """Build only the DataModule of a parsed recipe."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(TextVideoDataModule, "data")
    values = config.as_dict() if isinstance(config, Namespace) else config
    return parser.instantiate(parser.parse_object({"data": values})).data


def parse_recipe(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> RecipeCLI:
    """Parse recipes and instantiate `.model`, `.datamodule` and `.config`, with arguments as in `from_recipe`."""
    args = [item for path in paths for item in ("--config", str(path))]
    return RecipeCLI(args=[*args, *overrides], run=False)


def from_recipe(
    paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()
) -> tuple[RetrievalModule, TextVideoDataModule]:
    """Build method and data from recipe files, for use in Python.

    Args:
        paths: One or several recipe files; later ones override earlier ones.
        overrides: Options as on the command line, such as `--data.init_args.batch_size=32`.

    Raises:
        MissingAssetError: Data or weights are missing.
        RecipeError: Options are out of range or conflict.
    """
    cli = parse_recipe([paths] if isinstance(paths, (str, Path)) else paths, overrides)
    return cli.model, cli.datamodule


class _UnbuiltRecipe(RecipeCLI):
    """Recipe that is only parsed."""

    def before_instantiate_classes(self) -> None:
        """Check nothing."""

    def instantiate_classes(self) -> None:
        """Build nothing."""


def run_schema() -> int:
    """Print the JSON schema of recipes, with which editors complete and check them."""
    schema = cached_schema()
    if schema is None:
        unbuilt = _UnbuiltRecipe(args=["--config", str(find_recipe("tcmgc"))], run=False)
        schema = generate(unbuilt.parser)
    print(json.dumps(schema, indent=2))
    return 0


def _without_nulls(words: Sequence[str]) -> list[str]:
    """Convert `--a.init_args.b=null` to a recipe, because the parser reads nulls of nested classes as "None"."""
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
    """Build only the data of recipe files or of data overlays without a method; arguments as in `from_recipe`."""
    sections = [(f"--config {path}", {"data": read_recipe(path).get("data") or {}}) for path in paths]
    merged: dict[str, Any] = {}
    for _, section in sections:
        merged = _overlay(merged, section)
    chosen = any(word.startswith(("--data=", "--data.class_path")) for word in overrides)
    if not chosen and not merged.get("data", {}).get("class_path"):
        raise RecipeError(
            "No dataset is given. Name one before the overlays, such as --config data/msrvtt, or a method's recipe."
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(TextVideoDataModule, "data")
    try:
        config = parser.parse_args(list(overrides), namespace=parser.parse_object(merged))
    except ArgumentError as error:
        check_options([*sections, *sources_of(overrides)], generate(parser), import_modules=True)
        raise OptionError(refusals(str(error))) from error
    try:
        return parser.instantiate(config).data
    except ValueError as error:
        raise error if isinstance(error, UserError) else RecipeError(refusals(str(error))) from error


def _overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    joined = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(joined.get(key), dict)
        joined[key] = _overlay(joined[key], value) if both else value
    return joined


def _required_files(section: Namespace, encoder: Namespace) -> Iterator[Callable[[], object]]:
    """Yield checks for the files that a class, and the classes among its options, need.

    Args:
        section: Section with class_path and init_args.
        encoder: Encoder section of the model, which nested methods use.
    """
    options = section.get("init_args") or Namespace()
    module, _, name = section.class_path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    if hasattr(kind, "required_files"):
        yield partial(kind.required_files, **{"encoder": encoder, **vars(options)})
    for value in vars(options).values():
        if isinstance(value, Namespace) and "class_path" in value:
            yield from _required_files(value, encoder)
