"""Options of recipes and of the command line that do not exist, or have a value that they do not allow."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tvr_lightning.config.recipe_files import OptionError, is_written_out, nested, read_recipe, split_options
from tvr_lightning.config.schema import BOUNDS, cached_schema, class_name, types_of
from tvr_lightning.option_types import Range

LISTED = 12
"""Number of names that a message lists before it counts the others."""
SECTION = ("class_path", "init_args", "dict_kwargs")
NAMES = {
    "null": "null", "boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "text",
    "array": "a list", "object": "named options",
}  # fmt: skip

Source = tuple[str, dict[str, Any]]
"""Where options come from, and the options."""


def check_options(sources: Iterable[Source], schema: dict[str, Any], import_modules: bool = False) -> None:
    """Refuse the first class, option or value that the schema does not know.

    Args:
        sources: Options in the order in which they overlay each other.
        schema: Schema of `config/schema.py`.
        import_modules: Import the modules of classes from other packages, whose absence is then reported.

    Raises:
        OptionError: States where it is, and what is available, nearest first.
    """
    walk = _Walk(schema, import_modules)
    for where, options in sources:
        try:
            known = schema["properties"]
            for name, value in options.items():
                if name in known:
                    walk.value(name, known[name], value)
                else:
                    raise OptionError(f"there is no option {name}. {walk.meant(name)}")
        except OptionError as error:
            raise OptionError(f"{where}: {error}" if where else str(error)) from None


def check_before_parsing(recipes: Sequence[str], overrides: Sequence[str], needed: Sequence[str]) -> None:
    """Check recipes and options of a command against the cached schema, before torch is imported.

    `needed` are the sections whose class must be given, such as `data`. Without a cached schema, the parser checks
    later.
    """
    sources, schema = list(sources_of(recipes, overrides)), cached_schema()
    check_classes_given([content for _, content in sources], needed)
    if schema is not None:
        schema["properties"]["normalization"] = {"$ref": "#/$defs/Normalizer"}  # of `tvr evaluate`
        check_options(sources, schema)


def check_classes_given(contents: Sequence[dict[str, Any]], sections: Sequence[str]) -> None:
    """Refuse recipes and options that name no class for a section.

    Raises:
        OptionError: A section has no class.
    """
    for section in sections:
        values = [content.get(section) for content in contents]
        if not any(isinstance(value, str) or "class_path" in (value or {}) for value in values):
            name = {"data": "dataset", "model": "method"}[section]
            raise OptionError(
                f"No {name} is given. Name one before the overlays, such as --config data/msrvtt, or a method's recipe."
            )


def refusals(message: str) -> str:
    """Return what options classes refused, without the types that the parser tried; otherwise the whole message."""
    lines = [line.strip() for line in message.splitlines()]
    tried = ("Does not validate", "Expected a", "Given value", "Not a valid", "Problem with given class_path")
    said = [line[2:] for line in lines if line.startswith("- ") and not line[2:].startswith(tried)]
    return "; ".join(dict.fromkeys(said)) if lines and lines[0].startswith("Does not validate") and said else message


def nearest(name: str, names: Iterable[str]) -> str:
    """Return names in words, those that resemble `name` most first."""
    found = set(names) - {"$schema"}
    ordered = sorted(found, key=lambda x: (-difflib.SequenceMatcher(None, name.lower(), x.lower()).ratio(), x))
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return f"{', '.join(ordered[:LISTED])}{more}" if ordered else "none"


def in_words(names: Sequence[str]) -> str:
    """Return `a`, `a or b`, or `a, b, or c`."""
    *others, last = names
    return f"{', '.join(others)}{',' if len(others) > 1 else ''} or {last}" if others else last


def sources_of(recipes: Iterable[str | Path], arguments: Sequence[str]) -> Iterator[Source]:
    """Yield the contents of recipes, then the options of a command line as recipes would contain them.

    Args:
        recipes: Names, paths, or inline YAML.
        arguments: Options of recipes as on the command line.

    Raises:
        RecipeError: A recipe does not exist or is invalid.
    """
    for recipe in recipes:
        yield "" if is_written_out(recipe) else f"--config {recipe}", read_recipe(recipe)
    for option, value in split_options(arguments):
        if not option.endswith(".help") and option not in ("config", "print_config"):  # jsonargparse's own
            yield "", nested(option, _plain_value(value))


def _plain_value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


class _Walk:
    """Comparison of options with the schema; remembers the class that each section names."""

    def __init__(self, schema: dict[str, Any], import_modules: bool) -> None:
        self.known = schema["properties"]
        self.definitions = schema.get("$defs", {})
        self.import_modules = import_modules
        self.classes: dict[str, str] = {}

    def meant(self, name: str) -> str:
        """Return the option of a section that resembles a name at the top, or what there is at the top."""
        inner: dict[str, str] = {}
        for section, node in self.known.items():
            for variant in self.variants(node):
                prefix = f"--{section}.init_args" if class_name(variant) else f"--{section}"
                inner |= {option: f"{prefix}.{option}" for option in _options_of(variant) or ()}
        near = difflib.get_close_matches(name, inner, n=1, cutoff=0.75)
        return f"Did you mean {inner[near[0]]}?" if near else f"Available: {nearest(name, self.known)}"

    def value(self, where: str, node: dict[str, Any], value: Any) -> None:
        """Check the value of one option."""
        if isinstance(value, list):
            for item in value:
                self.value(where, node, item)
            return
        variants = list(self.variants(node))
        classes = {name: variant for variant in variants if (name := class_name(variant)) is not None}
        takes_text = any("string" in types_of(each) for each in (node, *node.get("anyOf", ())))
        if classes and (isinstance(value, dict) or (isinstance(value, str) and not takes_text)):
            self.section(where, classes, {"class_path": value} if isinstance(value, str) else value)
        elif isinstance(value, dict):
            self.options(where, next((v["properties"] for v in variants if "properties" in v), {}), value)
        elif variants and not any(_fits(variant, value) for variant in variants):
            if any("pattern" in variant for variant in variants):
                raise OptionError(f"{where} is {value!r}; expected {node['description']}")
            words = dict.fromkeys(word for variant in variants for word in _words(variant))
            expected = sorted(words, key=lambda word: word == "null")
            raise OptionError(f"{where} is {value!r}; expected {in_words(expected)}")

    def section(self, where: str, classes: dict[str, Any], value: dict[str, Any]) -> None:
        """Check a class and its options."""
        named = value.get("class_path") or self.classes.get(where)
        if named is None:  # a checkpoint or a later recipe names it
            return
        self.classes[where] = str(named)
        module, _, name = str(named).rpartition(".")
        own = module.split(".")[0] in ("", "tvr_lightning")
        if name not in classes or not own:
            if own or self.import_modules:
                self.absent(where, module, name, classes)
            if name not in classes:
                return
        given = {key: item for key, item in value.items() if key not in SECTION}
        known = _options_of(classes[name])
        options = {**(value.get("init_args") or {}), **given}
        for option in options:
            if known is not None and option not in known:
                having = sorted(other for other, kind in classes.items() if option in (_options_of(kind) or ()))
                owners = f" ({', '.join(having)} {'has' if len(having) == 1 else 'have'} one)" if having else ""
                raise OptionError(
                    f"{where}.init_args.{option}: {name} has no option {option}{owners}. Available: "
                    f"{nearest(option, known)}"
                )
        self.options(f"{where}.init_args", known or {}, options)

    def absent(self, where: str, module: str, name: str, classes: dict[str, Any]) -> None:
        """Refuse a class that does not exist."""
        reason = "which does not exist"
        if module:
            try:
                if not self.import_modules or hasattr(importlib.import_module(module), name):
                    return
                reason = f"but {module} has no {name}"
            except ImportError as error:
                reason = f"but {module} cannot be imported ({error}; Python looks for modules in PYTHONPATH)"
        own = "" if module else ". Name a class of your own with its module, as module.Class"
        full = f"{module}.{name}".lstrip(".")
        raise OptionError(f"{where}.class_path is {full}, {reason}. Available: {nearest(name, classes)}{own}")

    def options(self, where: str, known: dict[str, Any], options: dict[str, Any]) -> None:
        """Check named options."""
        for name, value in options.items():
            if name in known:
                self.value(f"{where}.{name}", known[name], value)
            elif known:
                raise OptionError(f"{where}.{name}: there is no such option. Available: {nearest(name, known)}")

    def variants(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the alternatives of a node, with the items of lists in place of the lists."""
        if "$ref" in node:
            yield from self.variants(self.definitions[node["$ref"].rpartition("/")[2]])
        elif "anyOf" in node:
            for each in node["anyOf"]:
                yield from self.variants(each)
        elif isinstance(node.get("items"), dict):
            yield from self.variants(node["items"])
        elif "prefixItems" in node:
            for each in node["prefixItems"]:
                yield from self.variants(each)
        else:
            yield node


def _options_of(variant: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options of a class or of a section without classes, or None if the schema does not list them."""
    options = variant.get("properties", {})
    return options if class_name(variant) is None else options.get("init_args", {}).get("properties")


def _fits(node: dict[str, Any], value: Any) -> bool:
    """Whether a value is allowed; only numbers, truth values, null, choices and patterns are compared."""
    if "enum" in node:
        return value in node["enum"]
    if "pattern" in node:
        return re.search(node["pattern"], str(value)) is not None
    kinds = types_of(node)
    if not kinds or {"string", "object"} & set(kinds):
        return True
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in kinds
    try:
        number = float(value)  # YAML reads 1e-4 as text
    except (TypeError, ValueError):
        return False
    if _range(node).refusal(number) is not None:
        return False
    return "number" in kinds or ("integer" in kinds and number.is_integer())


def _range(node: dict[str, Any]) -> Range:
    return Range(**{bound: node.get(key) for bound, key in BOUNDS.items()})


def _words(node: dict[str, Any]) -> list[str]:
    """Return the allowed values of a node in words."""
    if "enum" in node:
        return [str(choice) for choice in node["enum"]]
    if class_name(node):
        return ["a class"]
    limits = _range(node).words
    return [f"{NAMES[kind]} ({limits})" if limits and kind != "null" else NAMES[kind] for kind in types_of(node)]
