"""Evaluation of checkpoints: the options of their training, and those that a command changes.

Options such as a temperature change scores but not the shape of any tensor, so weights load with any value of them. The
evaluated model is therefore built from the checkpoint; recipes and options are applied on top, and changes are logged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse._util import import_object
from lightning.pytorch import LightningModule

from tvr_lightning.config.schema import hints_of
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.evaluation.weights import Weights, weights_of
from tvr_lightning.media.preparation import PREPARATION
from tvr_lightning.training.checkpoints import RECORD, CheckpointError, check_classes, named_classes, read_checkpoint
from tvr_lightning.training.options import changed_options, plain_options, value_text

# Options that may differ from the training, because scores do not depend on them or should follow the evaluation.
UNSCORED = {
    "optimizer", "evaluation", "gather", "protocol",  # of a method
    "freeze", "gradient_checkpointing", "compile_towers", "encoder_precision",  # of encoders
    "trained_in", "pretrained",  # initial weights
    "dropout", "dropout_per", "support_weight", "decorrelation", "loss_reduction", "loss_weighting",  # of training
    "bottleneck", "norm_variance", "direction", "divergence",  # losses of GARE and DPDV
}  # fmt: skip
# Options for reading the videos and texts of one dataset; they may differ for another dataset.
READING = {"frames", "words", "seconds", "sampling", "antialias", "audio", "audio_alignment", "audio_seconds"}
# Options of a dataset that do not apply to other datasets.
OF_DATASET = {
    "split", "seconds", "extra_captions", "features", "pixels", "holdout", "max_train_videos", "captions_per_epoch",
    "train_sampling",
}  # fmt: skip
# Filled by links between model and data.
LINKED = {"words", "frames"}


@dataclass(frozen=True)
class Difference:
    """Option that a command sets to another value than the checkpoint.

    Attributes:
        option: Dotted name.
        value: Value of the command.
        trained: Value of the checkpoint.
        scored: Whether scores of the same videos depend on the option.
    """

    option: str
    value: Any
    trained: Any
    scored: bool

    def __str__(self) -> str:
        """Return `option value (the checkpoint: value)`."""
        return f"{self.option} {value_text(self.value)} (the checkpoint: {value_text(self.trained)})"


class TrainedOptions:
    """Options of a checkpoint that is to be evaluated.

    Args:
        path: Path of the checkpoint.
        contents: Contents of the command's recipes and options, which name the classes from outside this package.
        trusted: Additional modules whose classes may be built.

    Raises:
        CheckpointError: The file does not exist, is not a checkpoint, or names classes of untrusted modules.
    """

    def __init__(self, path: Path, contents: Sequence[dict[str, Any]], trusted: Sequence[str] = ()) -> None:
        self.path = path
        self.saved = read_checkpoint(path)
        vouched = [name.rpartition(".")[0] for content in contents for name in named_classes(content)]
        check_classes(path, self.saved, [*trusted, *filter(None, vouched)])
        self._model = _class_and_options(self.saved["hyper_parameters"])
        self._data = _class_and_options(self.saved.get("datamodule_hyper_parameters") or {})
        self._asked_model = _last_class(contents, "model")
        self._asked_data = _last_class(contents, "data")

    @property
    def weights(self) -> Weights:
        """Record of the weights in the checkpoint."""
        return weights_of(self.saved)

    def recipe(self) -> dict[str, Any]:
        """Return the recipe of the checkpoint's training, which the command's recipes override.

        Raises:
            CheckpointError: Neither the checkpoint nor the command names the method, encoder or data, or the command
                names another method.
        """
        here = _name(self._model)
        if self._asked_model is not None and here is not None and self._asked_model != here:
            raise CheckpointError(
                f"{self.path}: the checkpoint contains {here}, but the recipe builds {self._asked_model}. Use a recipe "
                f"of {here}; to train question answering from it, set model.init_args.pretrained in `tvr fit`."
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
        return json.loads(json.dumps(found))  # converts tuples to lists

    def differences(self, options: Namespace, override: bool) -> list[Difference]:
        """Return the options that differ between a command and the checkpoint, method first.

        Args:
            options: Parsed options of the command.
            override: Allow options that change the scores.

        Raises:
            CheckpointError: The options change the scores, or the checkpoint has options that do not exist in this
                version.
        """
        found = []
        known = {}
        parser = ArgumentParser(exit_on_error=False)
        if _name(self._model) is not None and "encoder" in self._model["init_args"]:
            known["model"] = self._model
            parser.add_subclass_arguments(LightningModule, "model")
        if _name(self._data) is not None:
            known["data"] = self._data
            parser.add_subclass_arguments(TextVideoDataModule, "data")
        try:
            parsed = parser.parse_object(json.loads(json.dumps(known)))  # converts tuples to lists
        except ArgumentError as error:
            raise CheckpointError(
                f"{self.path} was trained with options that this version does not have: {error}"
            ) from error
        for section in known:
            then, now = (_written_out(found[section].as_dict()) for found in (parsed, options))
            for option, trained, value in changed_options(section, then, now):
                if not self._linked(option):
                    scored = self._scored(option, value, trained, options.data.class_path)
                    found.append(Difference(option, value, trained, scored))
        record = self.saved.get(RECORD) or {}
        precision = options.get("trainer.precision")
        if record.get("precision") and str(precision) != record["precision"]:
            found.append(Difference("trainer.precision", precision, record["precision"], False))
        lines = "".join(f"  - {item}\n" for item in found if item.scored)
        if lines and not override:
            raise CheckpointError(
                f"{self.path} was trained with other options, and the given ones change its scores:\n{lines}"
                "Omit them to use the checkpoint's options, or add --override to score with them anyway."
            )
        return found

    def _linked(self, option: str) -> bool:
        if option in {f"data.init_args.{name}" for name in PREPARATION}:
            return True
        # The data options contain the value; converted checkpoints have no data.
        return option.startswith("model.") and _name(self._data) is not None and option.rpartition(".")[2] in LINKED

    def _scored(self, option: str, value: Any, trained: Any, dataset: str) -> bool:
        section, *parts = option.split(".")
        if section == "data":
            return dataset.rpartition(".")[2] == _name(self._data) and parts[-1] in READING
        if parts[-1] == "weights":  # the file matters only for the activation of random weights
            return (value in (None, "none")) != (trained in (None, "none"))
        return not UNSCORED & set(parts)


def _last_class(contents: Sequence[Mapping[str, Any]], section: str) -> str | None:
    given = [content[section] for content in contents if content.get(section)]
    names = [value.get("class_path") if isinstance(value, dict) else value for value in given]
    return next((str(name).rpartition(".")[2] for name in reversed(names) if name), None)


def _class_and_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in saved.items() if name not in ("_class_path", "_instantiator")}
    return {"class_path": saved.get("_class_path"), "init_args": options}


def _name(section: Mapping[str, Any]) -> str | None:
    return str(section["class_path"]).rpartition(".")[2] if section["class_path"] else None


def _written_out(section: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed section whose options dataclasses contain their defaults instead of nulls."""
    given = section.get("init_args") or {}
    found = dict(given)
    for option, hint in hints_of(import_object(section["class_path"])).items():
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
