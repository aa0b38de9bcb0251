"""Recipes and options merged into one, and checked: those that do not exist or have a value that is not allowed."""

import difflib
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from tvr_lightning.config.recipe_files import is_written_out, nested, read_recipe, read_value, split_options
from tvr_lightning.config.schema import cached_schema, class_name
from tvr_lightning.errors import UserError, abbreviated
from tvr_lightning.option_types import alternatives, check_value

LISTED = 12
"""Number of names that a message lists before it counts the others."""
MISSING = {
    "data": "No dataset is given. Name one before the overlays, such as --config data/msrvtt, or a method's recipe.",
    "model": "No method is given. Name its recipe, such as --config tcmgc, or a checkpoint to evaluate (--ckpt_path).",
}

NORMALIZATION = {"normalization": {"$ref": "#/$defs/Normalizer"}}
"""Section of `tvr evaluate`, in a schema of recipes."""


class Source(NamedTuple):
    """Options from one place: beginning of a message, and content as of a recipe."""

    where: str
    content: dict[str, Any]


class Text(str):
    """Value on a command line, which is YAML or plain text, depending on the option."""


def check_before_parsing(recipes: Sequence[str], overrides: Sequence[str], needed: Sequence[str]) -> None:
    """Check recipes and options against the schema, if it is cached, and that the classes of `needed` are given."""
    sources = list(sources_of(recipes, overrides))
    check_classes_given(sources, needed)
    if (schema := cached_schema()) is not None:
        schema["properties"] |= NORMALIZATION
        merge(sources, schema)


def sources_of(recipes: Iterable[str | Path], arguments: Sequence[str]) -> Iterator[Source]:
    """Yield recipes (names, paths, or inline YAML), then options of a command line, which may name more recipes."""
    options = split_options(arguments)
    for recipe in [*recipes, *(value for option, value in options if option == "config")]:
        yield Source("" if is_written_out(recipe) else f"--config {recipe}: ", read_recipe(recipe))
    for option, value in options:
        if option not in ("config", "print_config") and not option.endswith(".help"):
            read = read_value(value)
            yield Source("", nested(option, read if read is None or isinstance(read, dict | list) else Text(value)))


def check_classes_given(sources: Iterable[Source], sections: Iterable[str]) -> None:
    """Refuse recipes and options that name no class for a section."""
    for section in sections:
        values = [source.content.get(section) for source in sources]
        if not any(isinstance(value, str) or "class_path" in (value or {}) for value in values):
            raise UserError(MISSING[section])


def merge(sources: Iterable[Source], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the values of all sources, later ones on top; refuse what the schema does not allow, and name what is."""
    merger = Merger(schema)
    found: dict[str, Any] = {}
    for source in sources:
        try:
            found = merger.merged(found, source.content)
        except UserError as error:
            raise UserError(f"{source.where}{error}") from None
    return found


def build(kind: Any, values: Any) -> Any:
    """Return the object of a type that plain values of a recipe describe."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--option", type=kind)
    with explained():
        return parser.instantiate(parser.parse_object({"option": values})).option


@contextmanager
def explained() -> Iterator[None]:
    """Turn what classes and the parser refuse into one sentence."""
    from jsonargparse import ArgumentError
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, MisconfigurationException, ArgumentError) as error:
        raise UserError(_refusals(str(error))) from error


def _refusals(message: str) -> str:
    """Return the errors of options classes and missing packages in a parser's message, or else the whole message."""
    mistyped = re.search(
        r'^Parser key "(.+?)":.*Expected a dot import path string: (\w+)$', message, re.DOTALL | re.MULTILINE
    )
    if mistyped:
        section, name = mistyped.groups()
        return f"{section}: there is no class {name}. {nearest(name, _classes_of_lightning())}"
    lines = [line.strip() for line in message.splitlines()]
    tried = ("Does not validate", "Expected a", "Given value", "Not a valid", "Problem with given class_path")
    said = [line[2:] for line in lines if line.startswith("- ") and not line[2:].startswith(tried)]
    said += [  # such as a package that is not installed
        f"{line.removeprefix('- Problem with given class_path ')} {reason}"
        for line, reason in itertools.pairwise(lines)
        if line.startswith("- Problem with given class_path") and not reason.startswith(("- ", *tried))
    ]
    of_options = lines and lines[0].startswith(("Does not validate", 'Parser key "trainer.'))
    return "; ".join(dict.fromkeys(said)) if of_options and said else message


def _classes_of_lightning() -> list[str]:
    from lightning.pytorch import callbacks, loggers, profilers, strategies

    return [*callbacks.__all__, *loggers.__all__, *profilers.__all__, *strategies.__all__]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return advice with the name that resembles `name`, or with all names, those that resemble it most first."""
    likeness = {x: difflib.SequenceMatcher(None, name.lower(), x.lower()).ratio() for x in names}
    ordered = sorted({*likeness} - {"$schema", "print_shtab"}, key=lambda x: (-likeness[x], x))
    if ordered and likeness[ordered[0]] >= 0.75:
        return f"Did you mean {ordered[0]}?"
    return f"Available: {abbreviated(ordered, LISTED) or 'none'}."


class Merger:
    """Options on top of others, compared with the schema. A class that replaces another keeps the options that fit."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.sections = schema["properties"]
        self.definitions = schema.get("$defs", {})

    def merged(self, under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
        """Return the sections and options of the top level of two recipes."""
        for name in over:
            if name.removesuffix("+") not in self.sections:
                near = self.similar(name)
                meant = f"Did you mean {near[0]}?" if near else nearest(name, self.sections)
                raise UserError(f"there is no option {name}. {meant}")
        return self.options("", self.sections, under, over)

    def similar(self, name: str) -> list[str]:
        """Return the option within a section that resembles a name, such as [`--data.init_args.root`], or nothing."""
        inner: dict[str, str] = {}
        for section, node in self.sections.items():
            for variant in self.variants(node):
                prefix = f"--{section}.init_args" if class_name(variant) else f"--{section}"
                inner |= {option: f"{prefix}.{option}" for option in _options_of(variant)}
        return [inner[near] for near in difflib.get_close_matches(name, inner, n=1, cutoff=0.75)]

    def value(self, where: str, node: dict[str, Any], under: Any, over: Any) -> Any:
        """Return the value of an option on top of another one."""
        variants = list(self.variants(node))
        items: dict[str, Any] = next((each["items"] for each in variants if isinstance(each.get("items"), dict)), {})
        if isinstance(over, list):
            if items:
                return [self.value(where, items, None, item) for item in over]
            over = [read_value(item) if isinstance(item, Text) else item for item in over]
        if isinstance(over, dict) and isinstance(under, list) and under:  # as in --trainer.callbacks.monitor=...
            return [*under[:-1], self.value(where, items, under[-1], over)]
        classes = {name: variant for variant in variants if (name := class_name(variant))}
        known: dict[str, Any] = next((variant["properties"] for variant in variants if "properties" in variant), {})
        takes_text = any(each.get("type") == "string" for each in alternatives(node))
        if isinstance(over, dict):
            unknown = not known and ("class_path" in over or isinstance(under, str) or "class_path" in (under or ()))
            if classes or unknown:
                return self.section(where, classes, under, over)
            inner = next((v["additionalProperties"] for v in variants if v.get("additionalProperties")), None)
            known = known or (dict.fromkeys(over, inner) if inner else {})
            return self.options(where, known, under if isinstance(under, dict) else {}, over)
        if classes and isinstance(over, str) and not takes_text:
            return self.section(where, classes, under, {"class_path": over})
        if isinstance(over, Text):
            over = str(over) if self.fits(node, str(over)) else read_value(over)
        check_value(where, node, over)
        return over

    def section(self, where: str, classes: dict[str, Any], under: Any, over: dict[str, Any]) -> dict[str, Any]:
        """Return a class and its options."""
        under = {"class_path": under} if isinstance(under, str) else under or {}
        before = under.get("class_path")
        named = over.get("class_path") or before
        given = {key: item for key, item in over.items() if key not in ("class_path", "init_args", "dict_kwargs")}
        given |= over.get("init_args") or {}
        kept = under.get("init_args") or {}
        if named is None:  # a checkpoint or a later recipe names it
            return {"init_args": self.options(f"{where}.init_args", {}, kept, given)}
        named = str(named)
        known = self.known(where, named, classes)
        if before is None:
            given = self.options(where, {}, kept, given)
            kept = {}
        elif short_name(before) != short_name(named):
            kept = {key: item for key, item in kept.items() if key in known and self.fits(known[key], item)}
        for option in given:
            if classes and known and option.removesuffix("+") not in known:
                having = sorted(other for other, kind in classes.items() if option in _options_of(kind))
                owners = f" ({', '.join(having)} {'has' if len(having) == 1 else 'have'} one)" if having else ""
                problem = f"{short_name(named)} has no option {option}{owners}. {nearest(option, known)}"
                raise UserError(f"{where}.init_args.{option}: {problem}")
        inner = self.options(f"{where}.init_args", known, kept, given)
        extra = (under.get("dict_kwargs") or {} if before == named else {}) | (over.get("dict_kwargs") or {})
        found: dict[str, Any] = {"class_path": named}
        if inner or known:
            found["init_args"] = inner
        if extra:
            found["dict_kwargs"] = extra
        return found

    def known(self, where: str, named: str, classes: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a class with their schemas; refuse a class that does not exist."""
        module, _, name = named.rpartition(".")
        if name in classes and module.partition(".")[0] in ("", "tvr_lightning"):
            return _options_of(classes[name])
        if classes:
            _check_exists(where, module, name, classes)
        return _options_of_other(named) if module else {}

    def fits(self, node: dict[str, Any], value: Any) -> bool:
        """Return whether an option allows a value."""
        try:
            self.value("", node, None, value)
        except UserError:
            return False
        return True

    def options(self, where: str, known: dict[str, Any], under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
        """Return named options on top of others. The values of an option that ends with + are appended to its list."""
        found = dict(under)
        for option, value in over.items():
            name = option.removesuffix("+")
            full = f"{where}.{name}" if where else name
            if known and name not in known:
                raise UserError(f"{full}: there is no such option. {nearest(name, known)}")
            node = known.get(name, {})
            if option == name:
                found[name] = self.value(full, node, under.get(name), value)
            else:
                more = self.value(full, node, None, value if isinstance(value, list) else [value])
                found[name] = [*(found.get(name, node.get("default")) or []), *more]
        return found

    def variants(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the alternatives of a node, with the classes that it refers to."""
        for each in alternatives(node):
            if "$ref" in each:
                yield from self.variants(self.definitions[each["$ref"].rpartition("/")[2]])
            else:
                yield each


@cache
def _options_of_other(named: str) -> dict[str, Any]:
    """Return the options of a class that is not in the schema, which allow any value."""
    from jsonargparse import ArgumentParser

    names = ArgumentParser().add_class_arguments(resolve_name(named), fail_untyped=False)
    return {name: {} for name in names}


def short_name(class_path: str) -> str:
    """Return the name of a class without its module."""
    return class_path.rpartition(".")[2]


def _check_exists(where: str, module: str, name: str, classes: dict[str, Any]) -> None:
    near = nearest(name, classes)
    if not module:
        own = "Name a class of your own with its module, as module.Class."
        raise UserError(f"{where}.class_path is {name}, which does not exist. {near} {own}")
    try:
        if hasattr(importlib.import_module(module), name):
            return
        reason = f"{module} has no {name}"
    except ImportError as error:
        reason = f"{module} cannot be imported ({error}; Python looks for modules in PYTHONPATH)"
    raise UserError(f"{where}.class_path is {module}.{name}, but {reason}. {near}")


def _options_of(variant: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = variant.get("properties", {})
    if class_name(variant):
        options = options.get("init_args", {}).get("properties", {})
    return options
