"""What a recipe or a command line names that does not exist, and what exists in its place, nearest first.

Asked after parsing has failed: the parser's own message lists every type that a value could have had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from tvr_lightning.recipe_files import config_of, is_written_out

LISTED = 12
"""Names that a sentence lists before it counts the others."""
SECTION = ("class_path", "init_args", "dict_kwargs")

Source = tuple[str, dict[str, Any]]
"""Where options stand, and the options."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Options that are the arguments of one class, which recipes do not choose, such as the trainer's."""

    kind: type


class _Wrong(Exception):  # noqa: N818  carries the sentence out of the walk
    """Something does not exist."""


def explain(sources: Iterable[Source], root: Mapping[str, Any]) -> str | None:
    """Return a sentence on the first class or option that does not exist, or None where all do.

    Args:
        sources: in the order in which they overlay each other.
        root: type of every option at the top; for a section whose class recipes choose, the class that all extend.
    """
    walk = _Walk()
    for where, options in sources:
        try:
            for name, value in options.items():
                if name not in root:
                    raise _Wrong(f"there is no option {name}. Available: {nearest(name, root)}")
                walk.visit(name, root[name], value)
        except _Wrong as error:
            return f"{where}: {error}" if where.endswith((".yaml", ".yml")) else str(error)
    return None


def refusals(message: str) -> str:
    """Return what options classes refuse, without the types that the parser tried around it; else the whole message.

    Args:
        message: of the parser, where a value is of none of the types of an option.
    """
    lines = [line.strip() for line in message.splitlines()]
    tried = ("Does not validate", "Expected a", "Given value", "Not a valid", "Problem with given class_path")
    said = [line[2:] for line in lines if line.startswith("- ") and not line[2:].startswith(tried)]
    return "; ".join(dict.fromkeys(said)) if lines and lines[0].startswith("Does not validate") and said else message


def nearest(name: str, names: Iterable[str]) -> str:
    """Return names in words, those first that resemble `name` most."""
    found = sorted(names, key=lambda other: -difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return f"{', '.join(found[:LISTED])}{more}" if found else "none"


def sources_of(arguments: Sequence[str]) -> Iterator[Source]:
    """Yield the recipes and options that a command line names, in order.

    Args:
        arguments: besides the verb.
    """
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        path = config_of(word, following)
        if path is not None:
            yield from _of_recipe(path)
        elif word.startswith("--"):
            option, given, value = word[2:].partition("=")
            found: Any = _plain_value(value if given else following)
            for key in reversed(option.removesuffix("+").split(".")):
                found = {key.replace("-", "_") if key == option else key: found}
            yield f"--{option}", found


def _of_recipe(path: str) -> Iterator[Source]:
    inline = is_written_out(path)
    with contextlib.suppress(OSError, yaml.YAMLError):  # said elsewhere
        content = yaml.safe_load(path if inline else Path(path).read_text(encoding="utf-8"))
        if isinstance(content, dict):
            yield ("--config" if inline else f"--config {path}"), content


def _plain_value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


class _Walk:
    """Goes through options beside the types that they are for; remembers which class each section names."""

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}

    def visit(self, where: str, hint: Any, value: Any) -> None:
        """Look at one option.

        Args:
            where: its dotted name.
            hint: its type.
            value: as the recipe has it.
        """
        if isinstance(hint, Arguments):
            self._arguments(where, hint.kind, value)
            return
        kinds = list(_kinds(hint))
        plain: Any = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        base: Any = next((kind for kind in kinds if _is_chosen(kind)), None)
        if isinstance(value, list):
            for item in value:
                self.visit(where, hint, item)
        elif base is not None and (isinstance(value, dict) or (isinstance(value, str) and str not in kinds)):
            self._section(where, base, {"class_path": value} if isinstance(value, str) else value)
        elif plain is not None and isinstance(value, dict):
            self._arguments(where, plain, value)
        elif not any(_fits(kind, value) for kind in kinds):
            expected = dict.fromkeys(word for kind in kinds for word in _words(kind))
            raise _Wrong(f"{where} is {value!r}; expected {' or '.join(expected)}")

    def _section(self, where: str, base: type, value: dict[str, Any]) -> None:
        if value.get("class_path") is not None:
            self.classes[where] = _find(f"{where}.class_path", str(value["class_path"]), base)
        kind = self.classes.get(where)
        if kind is None:
            return
        given = {name: item for name, item in value.items() if name not in SECTION}
        self._arguments(f"{where}.init_args", kind, {**(value.get("init_args") or {}), **given}, base)

    def _arguments(self, where: str, kind: type, value: Any, base: type | None = None) -> None:
        options = options_of(kind)
        for name, item in value.items() if isinstance(value, dict) and options else ():
            if name not in options:
                raise _Wrong(
                    f"{where}.{name}: {kind.__name__} has no option {name}{_owners(name, base)}. Available: "
                    f"{nearest(name, options)}"
                )
            self.visit(f"{where}.{name}", options[name], item)


def options_of(kind: type) -> dict[str, Any]:
    """Return the types of the arguments of a class by name, those included that it hands on to its base.

    Args:
        kind: any class.
    """
    found: dict[str, Any] = {}
    for each in inspect.getmro(kind):
        if "__init__" not in vars(each) or each is object:
            continue
        hints: dict[str, Any] = {}
        with contextlib.suppress(NameError, TypeError):  # names that a class imports for type checkers alone
            hints = get_type_hints(each.__init__)  # type: ignore[misc]
        parameters = list(inspect.signature(each.__init__).parameters.values())[1:]  # type: ignore[misc]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        found = {**{p.name: hints.get(p.name, Any) for p in named}, **found}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _owners(name: str, base: type | None) -> str:
    """Say which other classes of a section have an option of this name."""
    classes = {} if base is None else subclasses(base)
    having = [other for other, kind in sorted(classes.items()) if name in options_of(kind)]
    return f" ({', '.join(having)} {'has' if len(having) == 1 else 'have'} one)" if having else ""


def _find(where: str, name: str, base: type) -> type:
    classes = subclasses(base)
    module, _, last = name.rpartition(".")
    if not module and name in classes:
        return classes[name]
    reason = "there is no such class"
    if module:
        try:
            found = getattr(importlib.import_module(module), last, None)
        except ImportError as error:
            reason = f"{module} cannot be imported ({error}; Python looks for modules in PYTHONPATH)"
        else:
            if found is not None:
                return found
            reason = f"{module} has no {last}"
    own = "" if module else ". Name a class of your own with its module, as module.Class"
    raise _Wrong(f"{where}: {name}: {reason}. Available: {nearest(last, classes)}{own}")


def subclasses(base: type) -> dict[str, type]:
    """Return the classes that recipes can choose where `base` is asked for, by name."""
    found: dict[str, type] = {}
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        found |= subclasses(kind)
        if not inspect.isabstract(kind) and not kind.__name__.startswith("_"):
            found[kind.__name__] = kind
    return found


def _is_chosen(kind: Any) -> bool:
    """Whether a type stands for a section that names its class."""
    known = inspect.isclass(kind) and not dataclasses.is_dataclass(kind)
    return known and kind.__module__ not in ("builtins", "datetime", "pathlib", "typing")


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value can be of a type; yes for types that are no numbers, truth values, nulls and choices."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (bool, type(None)):
        return isinstance(value, kind)
    if kind in (int, float):
        with contextlib.suppress(TypeError, ValueError):
            return not isinstance(value, bool) and kind(value) is not None
        return False
    return True


def _words(kind: Any) -> list[str]:
    names = {type(None): "null", bool: "true or false", int: "a whole number", float: "a number"}
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else [names.get(kind, str(kind))]


def _kinds(hint: Any) -> Iterator[Any]:
    """Yield the single types that an annotation is made of; of a function, what it returns."""
    inner: Any = get_args(hint)
    if get_origin(hint) is Callable and inner:
        yield from _kinds(inner[-1])
    elif not inner or get_origin(hint) is Literal:
        yield hint
    else:
        for each in inner:
            if each is not ...:  # of a tuple of any length
                yield from _kinds(each)
