"""A recipe parsed to validated values, and built into a method and its data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jsonargparse
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import register_type
from lightning.pytorch import LightningModule, Trainer, seed_everything

import tvr_lightning.encoders
import tvr_lightning.evaluation.two_stage
import tvr_lightning.methods
import tvr_lightning.training.tf32  # noqa: F401  recipes name classes by their bare names once these are imported
from tvr_lightning import data as datasets
from tvr_lightning.config.check import Source, build, check_classes_given, explained, merge, sources_of
from tvr_lightning.config.checkpoint_options import TrainedOptions
from tvr_lightning.config.recipe_files import merged, split_options
from tvr_lightning.config.roles import FOLLOWS_DATA, FOLLOWS_ENCODER
from tvr_lightning.config.schema import cached_schema, generate, keep
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.encoders.pretrained import weights_follow
from tvr_lightning.encoders.tuning import FineTuning, Frozen
from tvr_lightning.errors import UserError, check_present
from tvr_lightning.evaluation.results import SelectOn
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.option_types import Count, Options
from tvr_lightning.training.checkpoints import FROZEN
from tvr_lightning.training.distributed import check_released_devices
from tvr_lightning.training.module import check_trainer, record_options
from tvr_lightning.training.options import value_text

datasets.import_all()

# A LightningModule is a RetrievalModule, or VideoQuestionAnswering.
CLASSES = {"model": LightningModule, "data": TextVideoDataModule}
register_type(torch.device, deserializer=torch.device)  # default of a callback's option
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, option: dumper.represent_data(option.value))  # another one


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


@dataclass
class CheckpointConfig(Options):
    """Settings for saving a run in addition to its best and last checkpoint, and for resuming it.

    Attributes:
        every_n_steps: number of optimizer steps between saves of `running.ckpt`; None saves only at interruptions.
        whole: save all weights. By default, if most weights are frozen, the checkpoints contain only the others, and
            the frozen ones of the encoder are loaded from its `weights`, as for a new run.
        resume: resumption from the newest checkpoint of this method and dataset in `results.directory`; without one, a
            new run starts. Use it for jobs that are queued again after an interruption.
    """

    every_n_steps: Count | None = None
    whole: bool = False
    resume: bool = False


@cache
def recipe_parser() -> ArgumentParser:
    """Return the parser of the sections of a recipe."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile)  # type: ignore[attr-defined]
    seed = "seed of the run; true for a random one, false for none"
    parser.add_argument("--seed_everything", type=bool | int, default=0, help=seed)
    parser.add_class_arguments(Trainer, "trainer", instantiate=False, fail_untyped=False, sub_configs=True)
    parser.set_defaults({"trainer.use_distributed_sampler": False, "trainer.num_sanity_val_steps": 0})
    for section, kind in CLASSES.items():
        parser.add_subclass_arguments(kind, section, fail_untyped=False, required=False)
    parser.add_argument("--results", type=ResultsConfig, default=ResultsConfig())
    parser.add_argument("--checkpoints", type=CheckpointConfig, default=CheckpointConfig())
    for name in sorted(FOLLOWS_DATA):
        parser.link_arguments(f"data.init_args.{name}", f"model.init_args.{name}")
        # For question answering, the options are those of a nested method; links to missing arguments are skipped.
        parser.link_arguments(f"data.init_args.{name}", f"model.init_args.method.init_args.{name}")
    for name in sorted(FOLLOWS_ENCODER):
        parser.link_arguments("model.encoder", f"data.init_args.{name}", attrgetter(name), apply_on="instantiate")
    return parser


def recipe_schema() -> dict[str, Any]:
    """Return the schema of recipes, which is made and cached if necessary."""
    return cached_schema() or keep(generate(recipe_parser()))


@dataclass
class Recipe:
    """Parsed recipe; nothing is built or read until `build`.

    Attributes:
        config: Values of all sections.
        trained: Checkpoint that is evaluated, whose options are the base of the recipe.
        changes: Options that differ from those of the checkpoint, and whether scores depend on each.
        dropped: Options of recipes that a later recipe dropped with their class.
        replaced: Warnings about overlays whose class, or whose options with it, a later recipe replaced.
    """

    config: Namespace
    trained: TrainedOptions | None = None
    changes: dict[str, bool] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    @classmethod
    def parse(
        cls,
        recipes: Sequence[str | Path],
        overrides: Sequence[str] = (),
        checkpoint: Path | None = None,
        trust: Sequence[str] = (),
        override: bool = False,
        only_data: bool = False,
    ) -> Recipe:
        """Parse recipes, later ones on top of earlier ones, and options on top of them.

        Args:
            recipes: Names, paths, or inline YAML.
            overrides: Options as on the command line, which may contain more recipes.
            checkpoint: Checkpoint to evaluate, on whose options everything is applied.
            trust: Modules whose classes the checkpoint may use, in addition to this package's.
            override: Allow options that change the checkpoint's scores.
            only_data: Ignore all sections of recipes but `data`, which may be overlays of a missing method.
        """
        sources = list(sources_of(recipes, overrides))
        if only_data:
            sources = [Source(where, {"data": content["data"]}) for where, content in sources if content.get("data")]
        contents = [source.content for source in sources]
        schema = recipe_schema()
        trained = None
        if checkpoint is None:
            check_classes_given(sources, ("data",) if only_data else ("model", "data"))
        else:
            trained = TrainedOptions(checkpoint, contents, trust)
            sources = [recorded := trained.recipe(), *sources]
            merge([recorded._replace(content=trained.sections())], schema)  # also those that follow others
        values = merge(sources, schema)
        parser = recipe_parser()
        with explained():
            if asked := [option for option, _ in split_options(overrides) if option == "print_config"]:
                parser.parse_args([f"--config={json.dumps(values)}", f"--{asked[0]}"])  # prints them and exits
            recipe = cls(_with_integers(parser.parse_object(values), values.get("trainer", {})), trained)
            if trained is not None:
                recipe.changes = trained.differences(parser, recipe.config, override)
        recipe.dropped = sorted({name for content in contents for name in _dropped(content, values)})
        recipe.replaced = list(_replaced(sources[trained is not None :], values))
        recipe._check_linked(contents)
        return recipe

    def plain(self) -> dict[str, Any]:
        """Return all sections as plain values."""
        # Nulls are kept, because a missing value would mean the default.
        text = recipe_parser().dump(self.config, skip_validation=True, skip_unset=False, format="json")
        sections: dict[str, Any] = json.loads(text)
        return sections

    def check(self, stage: str | None = None) -> None:
        """Check the precision, then the data and weights that a stage (None: all) needs, before anything is loaded."""
        self.check_trainer()
        data = self.build_data()
        model = self.config.model
        if stage is None:  # training
            options = model.init_args
            check_released_devices(options.get("released_devices"), options.get("gather"), data.batch_size)
        tuning = model.init_args.get("tuning")
        if data.features and tuning and not issubclass(resolve_name(tuning.class_path), FineTuning | Frozen):
            raise UserError(
                f"model.init_args.tuning {tuning.class_path.rpartition('.')[2]} trains the encoder, whose features in "
                f"{data.features} are fixed. Set it to Frozen, or unset data.init_args.features."
            )
        evaluation = model.init_args.get("evaluation")
        if evaluation is not None and evaluation.normalization is not None:
            stage = None  # a normalization may use queries of the training split
        with self._checkpoint_follows(), explained():
            files = _required_files(model, model.init_args.encoder)
            check_present([partial(data.check_present, stage), *files])

    def check_trainer(self) -> None:
        """Refuse a precision or strategy that the method or the encoder does not support, before anything is loaded."""
        model = self.config.model.init_args
        precision = str(self.config.trainer.precision or "32-true")
        strategy = self.config.trainer.strategy
        named, given = (strategy, {}) if isinstance(strategy, str) else (strategy.class_path, _options_of(strategy))
        if given.get("save_distributed_checkpoint") or given.get("state_dict_type") == "sharded":
            raise UserError(
                "trainer.strategy: a checkpoint of shards cannot be read without running code from it. Set "
                "save_distributed_checkpoint: false (or state_dict_type: full)."
            )
        if given.get("start_method", "popen") != "popen" or any(way in named for way in ("spawn", "fork", "notebook")):
            raise UserError(
                f"trainer.strategy {named} starts processes that end with the training, so that nothing could be "
                "tested. Use ddp."
            )
        finds_unused = given.get("find_unused_parameters") or "find_unused" in named
        kind = resolve_name(self.config.model.class_path)
        if "ddp" in named.lower() and not kind.trains_all_parameters and not finds_unused:
            raise UserError(
                f"trainer.strategy: {kind.__name__} does not train the layers of its method that only score pairs, so "
                "DDP would stop at the second step. Add --trainer.strategy=ddp_find_unused_parameters_true"
            )
        encoder = model.encoder if "encoder" in model else model.method.init_args.encoder
        check_trainer(precision, named)
        resolve_name(encoder.class_path).check_trainer(precision, named, **_options_of(encoder))

    def build_data(self) -> TextVideoDataModule:
        """Build only the data, as it is before the method sets the size of its frames."""
        data: TextVideoDataModule = build(TextVideoDataModule, self.config.data.as_dict())
        return data

    def build(self) -> Namespace:
        """Seed the random generators, and return all sections with `model` and `data` built."""
        parser = recipe_parser()
        seed = self.config.seed_everything
        if seed is not False:
            self.config.seed_everything = seed_everything(None if seed is True else seed, workers=True)
        text = parser.dump(self.config, skip_link_targets=False, skip_unset=False, skip_validation=True, format="json")
        sections = json.loads(text)
        kinds = [(partial(_build_recorded, sections[name], name), kind, True) for name, kind in CLASSES.items()]
        with self._checkpoint_follows(), explained():
            return _with_integers(parser.instantiate(self.config, instantiators=kinds), vars(self.config.trainer))

    def _checkpoint_follows(self) -> Any:
        # A checkpoint that is evaluated replaces the weights of the encoders.
        return nullcontext() if self.trained is None or FROZEN in self.trained.saved else weights_follow()

    def _check_linked(self, contents: Sequence[dict[str, Any]]) -> None:
        """Refuse values of the method that those of the data would replace."""
        for content in contents:
            model = content.get("model")
            given = (model.get("init_args") or {}) if isinstance(model, dict) else {}
            for name in FOLLOWS_DATA & {*given}:
                used = self.config.data.init_args[name]
                if str(given[name]) != str(used):  # a command line gives text
                    raise UserError(
                        f"model.init_args.{name} is {given[name]}, but it follows data.init_args.{name}, which is "
                        f"{used}. Set that option instead."
                    )


def _with_integers(parsed: Namespace, trainer: Mapping[str, Any]) -> Namespace:
    """Restore integers of the Trainer: the parser may turn 1, which is one batch, into 1.0, which is all of them."""
    for name, value in trainer.items():
        if type(value) is int:
            parsed.trainer[name] = value
    return parsed


def _build_recorded(
    section: dict[str, Any], name: str, kind: Any, *args: Any, applied_instantiation_links: Any, **kwargs: Any
) -> Any:
    """Build the class of a section, and record the section for checkpoints."""
    built = kind(*args, **kwargs)
    start = f"{name}.init_args."
    links = {to.removeprefix(start): value for to, value in applied_instantiation_links.items() if to.startswith(start)}
    record_options(built, {"_class_path": section["class_path"], **section["init_args"], **links})
    return built


def from_recipe(
    paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()
) -> tuple[RetrievalModule, TextVideoDataModule]:
    """Build method and data from recipe files and options such as `--data.init_args.batch_size=32`."""
    recipe = Recipe.parse([paths] if isinstance(paths, (str, Path)) else paths, overrides)
    recipe.check()
    built = recipe.build()
    return built.model, built.data


def data_from_recipe(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> TextVideoDataModule:
    """Build only the data of recipe files or of data overlays without a method; arguments as in `from_recipe`."""
    return Recipe.parse(paths, overrides, only_data=True).build_data()


def with_defaults(older: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of an older run, in which an option that is missing has its default.

    Only classes that `now` names too are imported, since `older` may come from elsewhere.
    """
    with explained():
        defaults = recipe_parser().parse_object(_in_both(now, older))
    sections: dict[str, Any] = merged(Recipe(defaults).plain(), older)
    return sections


def _in_both(now: Any, older: Any) -> Any:
    """Return the options of `now` that `older` also has; those of another class stay."""
    if not (isinstance(now, dict) and isinstance(older, dict)):
        return now
    kinds = [str(options.get("class_path")).rpartition(".")[2] for options in (now, older)]
    if kinds[0] != kinds[1]:
        return now
    return {key: _in_both(value, older[key]) for key, value in now.items() if key in older}


def _dropped(given: Any, used: Any, name: str = "") -> Iterator[str]:
    if isinstance(given, dict) and isinstance(used, dict):
        for key, value in given.items():
            if key in used:
                yield from _dropped(value, used[key], f"{name}{key}.")
            elif name.endswith(".init_args."):
                yield f"{name}{key}"


def _replaced(sources: Sequence[Source], used: dict[str, Any]) -> Iterator[str]:
    """Yield a warning for every overlay whose class, or whose options with it, a later recipe replaces."""
    last: dict[str, tuple[str, str]] = {}  # by option, the class in use and the recipe that names it, if any does
    for source in reversed(sources):
        recipe = source.where.removesuffix(": ")
        named = dict(_classes(source.content, used))
        lost = {name.rpartition(".init_args.")[0] for name in _dropped(source.content, used)}
        for option, (kind, by) in last.items():
            is_overlay = recipe and "model" not in named  # not options, nor the recipe of a method
            if by and is_overlay and (option in lost or named.get(option, kind) != kind):
                yield f"{by} replaces {option} of {recipe} with {kind}"
        last = {option: (kind, recipe) for option, kind in named.items()} | last


def _classes(given: dict[str, Any], used: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the options of a recipe that name a class, or null instead, and its name."""
    for key, value in given.items():
        now = used.get(key) if isinstance(used, dict) else None
        kind = value.get("class_path") if isinstance(value, dict) else value
        if value is None or (kind and (isinstance(value, dict) or isinstance(now, dict))):
            yield f"{name}{key}", value_text(kind).rpartition(".")[2]
        if isinstance(value, dict):
            yield from _classes(value, now, f"{name}{key}.")


def _options_of(section: Namespace) -> dict[str, Any]:
    return vars(section.get("init_args") or Namespace())


def _required_files(section: Namespace, encoder: Namespace) -> Iterator[Callable[[], object]]:
    """Yield checks for the files of a class and of the classes among its options; nested methods use `encoder`."""
    options = _options_of(section)
    kind = resolve_name(section.class_path)
    if hasattr(kind, "required_files"):
        yield partial(kind.required_files, **{"encoder": encoder, **options})
    for value in options.values():
        if isinstance(value, Namespace) and "class_path" in value:
            yield from _required_files(value, encoder)
