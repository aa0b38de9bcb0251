"""Evaluating what was trained: the options that a checkpoint was trained with, and what a command sets otherwise.

Options such as a temperature change scores and no tensor's shape, so that weights load under any value of them. What is
evaluated is therefore built from the checkpoint; recipes and options come on top, and what they change is said.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch import Callback, LightningModule, Trainer

from tvr_lightning.checkpoints import RECORD, CheckpointError, check_classes, named_classes, read_checkpoint
from tvr_lightning.config.schema import hints_of
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.evaluation.weights import Weights, record_of, weights_of
from tvr_lightning.media.preparation import PREPARATION
from tvr_lightning.options import flat_options, plain_options, value_text
from tvr_lightning.recipe_files import config_of

# Options that may differ from the training: scores do not depend on them, or depend on them as the evaluation asks.
UNSCORED = {
    "optimizer", "evaluation", "gather", "protocol",  # of a method
    "freeze", "gradient_checkpointing", "compile_towers", "encoder_precision",  # of encoders
    "trained_in", "pretrained",  # where training began
    "dropout", "dropout_per", "support_weight", "decorrelation", "loss_reduction", "loss_weighting",  # of training
    "bottleneck", "norm_variance", "direction", "divergence",  # losses of GARE and DPDV
}  # fmt: skip
# How the videos and texts of one dataset are read; another dataset may be read in its own way.
READING = {"frames", "words", "seconds", "sampling", "antialias", "audio", "audio_alignment", "audio_seconds"}
# What belongs to a dataset and says nothing of another one.
OF_DATASET = {
    "split", "seconds", "extra_captions", "features", "holdout", "max_train_videos", "captions_per_epoch",
    "train_sampling",
}  # fmt: skip
# Links between model and data fill these in.
LINKED = {"words", "frames"}


@dataclass(frozen=True)
class Difference:
    """An option that a command sets otherwise than the checkpoint.

    Attributes:
        option: dotted name.
        value: of the command. trained: of the checkpoint.
        scored: whether scores of the same videos depend on it.
    """

    option: str
    value: Any
    trained: Any
    scored: bool

    def __str__(self) -> str:
        """`option value (the checkpoint: value)`."""
        return f"{self.option} {value_text(self.value)} (the checkpoint: {value_text(self.trained)})"


class Trained:
    """A checkpoint about to be evaluated.

    Args:
        path: of the checkpoint.
        arguments: of the command line besides the verb; other classes than this package's must be named there.
        trusted: modules whose classes may be built besides.

    Raises:
        CheckpointError: no such file, no checkpoint, or it names classes that nobody vouched for.
    """

    def __init__(self, path: Path, arguments: Sequence[str], trusted: Sequence[str] = ()) -> None:
        self.path = path
        self.saved = read_checkpoint(path)
        named = _contents(arguments)
        vouched = [name.rpartition(".")[0] for content in named for name in named_classes(content)]
        check_classes(path, self.saved, [*trusted, *filter(None, vouched)])
        self._model = _class_and_options(self.saved["hyper_parameters"])
        self._data = _class_and_options(self.saved.get("datamodule_hyper_parameters") or {})
        self._asked_model = _last_class(named, "model")
        self._asked_data = _last_class(named, "data")

    @property
    def weights(self) -> Weights:
        """What the checkpoint says of its weights."""
        return weights_of(self.saved)

    def recipe(self) -> dict[str, Any]:
        """Return what the checkpoint was trained with as a recipe, to be laid below those of the command.

        Raises:
            CheckpointError: it does not name its method, encoder or data, and neither does the command; or the command
                names another method.
        """
        here = _name(self._model)
        if self._asked_model is not None and here is not None and self._asked_model != here:
            answers = self._asked_model == "VideoQuestionAnswering"
            more = (
                ". To train question answering from it, set model.init_args.pretrained in `tvr fit`." if answers else ""
            )
            raise CheckpointError(
                f"{self.path}: the checkpoint contains {here}, but the recipe builds {self._asked_model}{more}"
            )
        found: dict[str, Any] = {}
        if "encoder" in self._model["init_args"] and here is not None:
            found["model"] = _without(self._model, LINKED)
            if "method" in found["model"]["init_args"]:
                found["model"]["init_args"]["method"] = _without(found["model"]["init_args"]["method"], LINKED)
        elif self._asked_model is None:
            raise CheckpointError(
                f"{self.path} does not record its {'method' if here is None else 'encoder'}. Pass the recipe of its "
                "training: --config FILE"
            )
        if _name(self._data) is not None:
            other = self._asked_data not in (None, _name(self._data))
            found["data"] = _without(self._data, {*PREPARATION} | (OF_DATASET if other else set()))
        elif self._asked_data is None:
            raise CheckpointError(
                f"{self.path} does not record its training data. Name the data to test on, such as --config "
                "recipes/data/msrvtt.yaml"
            )
        record = self.saved.get(RECORD) or {}
        if record.get("precision"):
            found["trainer"] = {"precision": record["precision"]}
        if record.get("seed") is not None:
            found["seed_everything"] = record["seed"]
        return json.loads(json.dumps(found))  # tuples become lists

    def differences(self, options: Namespace) -> list[Difference]:
        """Return what a command sets otherwise than the checkpoint, method first.

        Args:
            options: of the verb, as parsed.

        Raises:
            CheckpointError: the checkpoint's options are not those of this version.
        """
        found = []
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(LightningModule, "model", required=False)
        parser.add_subclass_arguments(TextVideoDataModule, "data", required=False)
        sections = {"model": self._model, "data": self._data}
        known = {name: section for name, section in sections.items() if _name(section) is not None}
        if "encoder" not in self._model["init_args"]:
            known.pop("model", None)
        try:
            parsed = parser.parse_object(json.loads(json.dumps(known)))
        except ArgumentError as error:
            raise CheckpointError(
                f"{self.path} was trained with options that this version does not have: {error}"
            ) from error
        for section in known:
            now, then = (
                dict(flat_options(section, _written_out(config[section].as_dict()))) for config in (options, parsed)
            )
            for option in [*then, *(name for name in now if name not in then)]:
                value, trained = now.get(option, "nothing"), then.get(option, "nothing")
                if value != trained and not self._linked(option):
                    found.append(Difference(option, value, trained, self._scored(option, value, trained, options)))
        record = self.saved.get(RECORD) or {}
        precision = options.get("trainer.precision")
        if record.get("precision") and str(precision) != record["precision"]:
            found.append(Difference("trainer.precision", precision, record["precision"], False))
        return found

    def _linked(self, option: str) -> bool:
        if option in {f"data.init_args.{name}" for name in PREPARATION}:
            return True
        # The data say it; converted checkpoints have none.
        return option.startswith("model.") and _name(self._data) is not None and option.rpartition(".")[2] in LINKED

    def _scored(self, option: str, value: Any, trained: Any, options: Namespace) -> bool:
        section, *parts = option.split(".")
        if section == "data":
            same = options.data.class_path.rpartition(".")[2] == _name(self._data)
            return same and parts[-1] in READING
        if parts[-1] == "weights":  # of which file they came matters only for the activation of random ones
            return (value in (None, "none")) != (trained in (None, "none"))
        return not UNSCORED & set(parts)


def starting_weights(model: LightningModule, options: Namespace) -> Weights:
    """Return what is evaluated without a checkpoint.

    Args:
        model: the method.
        options: it was built with.
    """
    encoder = options.encoder.as_dict()
    kind, given = encoder["class_path"].rpartition(".")[2], encoder.get("init_args") or {}
    start = given.get("weights") or given.get("trained_in")
    if start in (None, "none"):
        return Weights("untrained", start=f"the encoder {kind} starts from random weights")
    rest = f", and {new_layers(model)} parameters outside the encoder are untrained" if new_layers(model) else ""
    return Weights("zero-shot", start=f"the encoder has its pretrained weights ({start}){rest}")


def new_layers(model: LightningModule) -> int:
    """Return how many parameters a method has beside its encoders and the temperature, which it takes from CLIP."""
    known = ("encoder", "audio_encoder", "temperature")
    return sum(p.numel() for name, p in model.named_parameters() if not {*name.split(".")[:2]} & {*known})


class WeightsRecord(Callback):
    """Writes into every checkpoint which run saved it, so that a test can say what its weights are.

    Args:
        monitor: the score that chooses the best epoch.
        seed: of the run.
    """

    def __init__(self, monitor: str, seed: int | None) -> None:
        self.monitor, self.seed = monitor, seed

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the record; which file it becomes, the checkpoint writer adds."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        chosen_on = "test" if data.validation == "test" else "val"
        checkpoint[RECORD] = record_of(
            trainer.log_dir, chosen_on, self.monitor, str(trainer.precision), self.seed, data.full_title
        )


def given(arguments: Sequence[str], name: str) -> list[str]:
    """Return what a command line, and recipes that it names, give an option of the verb itself; the last one counts.

    Args:
        arguments: besides the verb.
        name: such as `ckpt_path`.
    """
    found: list[str] = []
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if word == f"--{name}":
            found.append(following)
        elif word.startswith(f"--{name}="):
            found.append(word.partition("=")[2])
        elif (path := config_of(word, following)) is not None:
            value = _read(path).get(name)
            found += [str(item) for item in value] if isinstance(value, list) else [str(value)] if value else []
    return found


def _read(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}  # the parser of the options says what is wrong with it
    return content if isinstance(content, dict) else {}


def _contents(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """What a command line says, in order: recipes, and classes that it names itself."""
    found: list[dict[str, Any]] = []
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        path = config_of(word, following)
        if path is not None:
            found.append(_read(path))
            continue
        option, given, value = word.partition("=")
        value = value if given else following
        option = option.removeprefix("--").removesuffix(".class_path")
        if word.startswith("--") and value and not value.startswith("-"):
            inner: dict[str, Any] = {"class_path": value}
            for key in reversed(option.split(".")):
                inner = {key: inner}
            if option in ("model", "data") or word.partition("=")[0].endswith(".class_path"):
                found.append(inner)
    return found


def _last_class(contents: Sequence[Mapping[str, Any]], section: str) -> str | None:
    names = [content[section].get("class_path") for content in contents if isinstance(content.get(section), dict)]
    return next((str(name).rpartition(".")[2] for name in reversed(names) if name), None)


def _class_and_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in saved.items() if name not in ("_class_path", "_instantiator")}
    return {"class_path": saved.get("_class_path"), "init_args": options}


def _name(section: Mapping[str, Any]) -> str | None:
    return str(section["class_path"]).rpartition(".")[2] if section["class_path"] else None


def _written_out(section: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed section whose options dataclasses hold their defaults instead of nulls."""
    module, _, name = section["class_path"].rpartition(".")
    given = section.get("init_args") or {}
    found = dict(given)
    for option, hint in hints_of(getattr(importlib.import_module(module), name)).items():
        kind = next((item for item in get_args(hint) if dataclasses.is_dataclass(item)), None)
        if kind is not None and option in given:
            parser = ArgumentParser(exit_on_error=False)
            parser.add_argument("--options", type=kind)
            parsed = parser.parse_object({"options": given[option] or {}})
            found[option] = plain_options(parser.instantiate(parsed).options)
    return {**section, "init_args": found}


def _without(section: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    options = {name: value for name, value in section.get("init_args", {}).items() if name not in names}
    return {"class_path": section["class_path"], "init_args": options}
