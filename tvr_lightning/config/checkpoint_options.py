"""Evaluation of checkpoints: the options of their training, and those that a command changes.

Options such as a temperature change scores but not the shape of any tensor, so weights load with any value of them. The
evaluated model is therefore built from the checkpoint; recipes and options are applied on top, and changes are logged.
"""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from tvr_lightning.config.check import Source, build
from tvr_lightning.config.roles import FOLLOWS_DATA, FOLLOWS_ENCODER, option_roles, roles_of_option
from tvr_lightning.option_types import Role, Roles, dataclass_in, hints_of
from tvr_lightning.training.checkpoints import RECORD, CheckpointError, named_code, read_checkpoint, trusted_sections
from tvr_lightning.training.options import changed_options, plain_options, value_text


class TrainedOptions:
    """Options of a checkpoint that is to be evaluated with the `contents` of the command's recipes and options.

    It may run code of this package, code that the contents name, and that of `trusted` modules and repositories.
    """

    def __init__(self, path: Path, contents: Sequence[dict[str, Any]], trusted: Sequence[str] = ()) -> None:
        self.path = path
        self.saved = read_checkpoint(path)
        sections = trusted_sections(path, self.saved, [*trusted, *named_code(contents)])
        self._model = sections["model"]
        self._data = sections["data"]
        self.method, self.dataset = (_last_class([sections], section) for section in sections)
        self._asked_model, self._asked_data = (_last_class(contents, section) for section in ("model", "data"))
        self._record = self.saved.get(RECORD) or {}

    def recipe(self) -> Source:
        """Return the recipe of the training, which the command's recipes override, with the version of the file."""
        if self._asked_model is not None and self.method is not None and self._asked_model != self.method:
            raise CheckpointError(
                f"{self.path}: the checkpoint contains {self.method}, but the recipe builds {self._asked_model}. Use a "
                f"recipe of {self.method}; to train question answering from it, set model.init_args.pretrained in "
                "`tvr fit`."
            )
        found = self.sections()
        if "model" in found:
            found["model"] = _without(found["model"], FOLLOWS_DATA)
        elif self._asked_model is None:
            raise CheckpointError(
                f"{self.path} does not record its {'encoder' if self.method else 'method'}. Pass the recipe of its "
                "training: --config FILE"
            )
        if "data" not in found and self._asked_data is None:
            raise CheckpointError(
                f"{self.path} does not record its training data. Name the data to test on, such as --config "
                "recipes/data/msrvtt.yaml"
            )
        if "data" in found and self._asked_data not in (None, self.dataset):
            roles = option_roles(found["data"], "data")
            own = {name.rpartition(".")[2] for name, its in roles.items() if Role.DATASET in its}
            found["data"] = _without(found["data"], own)
        if self._record.get("precision"):
            found["trainer"] = {"precision": self._record["precision"]}
        if self._record.get("seed") is not None:
            found["seed_everything"] = self._record["seed"]
        version = self._record.get("version", "of an unrecorded version")
        return Source(f"{self.path}, written by tvr-lightning {version}: ", found)

    def differences(self, parser: ArgumentParser, options: Namespace, override: bool) -> dict[str, bool]:
        """Return the options that differ from the checkpoint, and whether scores of the same videos depend on each.

        Refuse options that change the scores unless `override`.
        """
        found: dict[str, bool] = {}
        known = self.sections()
        parsed = parser.parse_object(known)
        for section in known:
            then, now = (_written_out(each[section]) for each in (parsed, options))
            roles = [option_roles(each, section) for each in (then, now)]
            for option, trained, value in changed_options(section, then, now):
                follows_data = section == "model" and "data" in known and option.rpartition(".")[2] in FOLLOWS_DATA
                if not follows_data:
                    affected = frozenset[Role]().union(*(roles_of_option(each, option) for each in roles))
                    change = f"{option} {value_text(value)} (the checkpoint: {value_text(trained)})"
                    found[change] = self._scored(option, affected, value, trained, options.data.class_path)
        precision = options.get("trainer.precision")
        trained_in = self._record.get("precision")
        if trained_in and str(precision) != trained_in:
            found[f"trainer.precision {precision} (the checkpoint: {trained_in})"] = False
        lines = "".join(f"  - {change}\n" for change, scored in found.items() if scored)
        if lines and not override:
            raise CheckpointError(
                f"{self.path} was trained with other options, and the given ones change its scores:\n{lines}"
                "Omit them to use the checkpoint's options, or add --override to score with them anyway."
            )
        return found

    def sections(self) -> dict[str, Any]:
        """Return the recorded sections of method and data; a method without its encoder cannot be built."""
        found = {}
        if self.method is not None and "encoder" in self._model["init_args"]:
            found["model"] = self._model
        if self.dataset is not None:
            found["data"] = _without(self._data, FOLLOWS_ENCODER)
        return found

    def _scored(self, option: str, roles: Roles, value: Any, trained: Any, dataset: str) -> bool:
        if option.startswith("data.") and dataset.rpartition(".")[2] != self.dataset:
            return False
        if option.endswith(".weights"):  # the file matters only for the activation of random weights
            return (value in (None, "none")) != (trained in (None, "none"))
        return bool(roles & {Role.SCORE, Role.READING})


def _last_class(contents: Sequence[Mapping[str, Any]], section: str) -> str | None:
    given = [content[section] for content in contents if content.get(section)]
    names = [value.get("class_path") if isinstance(value, dict) else value for value in given]
    return next((str(name).rpartition(".")[2] for name in reversed(names) if name), None)


def _written_out(section: Namespace) -> dict[str, Any]:
    """Return a parsed section whose options dataclasses contain their defaults instead of nulls."""
    found = section.as_dict()
    options = found.setdefault("init_args", {})
    for option, hint in hints_of(resolve_name(section.class_path)).items():
        if (kind := dataclass_in(hint)) is not None and option in options:
            options[option] = plain_options(build(kind, options[option] or {}))
    return found


def _without(section: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """Return a section without some options, also of a method within the method."""
    options = {name: value for name, value in (section.get("init_args") or {}).items() if name not in names}
    if "method" in options:
        options["method"] = _without(options["method"], names)
    return {"class_path": section["class_path"], "init_args": options}
