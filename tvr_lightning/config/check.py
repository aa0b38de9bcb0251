"""Options of recipes and of the command line that do not exist, or have a value that they do not allow."""

import difflib
import importlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tvr_lightning.config.recipe_files import find_recipe, is_written_out, nested, read_recipe, split_options
from tvr_lightning.config.schema import BOUNDS, cached_schema, class_name, types_of
from tvr_lightning.errors import UserError, abbreviated
from tvr_lightning.option_types import Range, in_words

LISTED = 12
"""Number of names that a message lists before it counts the others."""
NAMES = {
    "null": "null", "boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "text",
    "array": "a list", "object": "named options",
}  # fmt: skip
MISSING = {
    "data": "No dataset is given. Name one before the overlays, such as --config data/msrvtt, or a method's recipe.",
    "model": "No method is given. Name its recipe, such as --config tcmgc, or a checkpoint to evaluate (--ckpt_path).",
}


class Source(NamedTuple):
    """Options from one place: beginning of a message, content as of a recipe, and argument for the parser."""

    where: str
    content: dict[str, Any]
    argument: str


def check_before_parsing(recipes: Sequence[str], overrides: Sequence[str], needed: Sequence[str]) -> None:
    """Check recipes and options against the schema, if it is cached, and that the classes of `needed` are given."""
    sources, schema = list(sources_of(recipes, overrides)), cached_schema()
    check_classes_given(sources, needed)
    if schema is not None:
        schema["properties"]["normalization"] = {"$ref": "#/$defs/Normalizer"}  # of `tvr evaluate`
        check_options(sources, schema)


def sources_of(recipes: Iterable[str | Path], arguments: Sequence[str]) -> Iterator[Source]:
    """Yield recipes (names, paths, or inline YAML), then options of a command line, which may name more recipes."""
    import yaml

    options = split_options(arguments)
    for recipe in [*recipes, *(value for option, value in options if option == "config")]:
        written_out = is_written_out(recipe)
        argument = f"--config={recipe if written_out else find_recipe(recipe)}"
        yield Source("" if written_out else f"--config {recipe}: ", read_recipe(recipe), argument)
    for option, value in options:
        if option == "print_config" or option.endswith(".help"):  # jsonargparse's own
            yield Source("", {}, f"--{option}={value}".removesuffix("="))
        elif option != "config":
            try:
                content = nested(option, yaml.safe_load(value))
            except yaml.YAMLError:
                content = nested(option, value)
            # The parser would read a null among the arguments of a class as the text "None".
            null = value == "null" and ".init_args." in option
            yield Source("", content, f"--config={json.dumps(content)}" if null else f"--{option}={value}")


def check_classes_given(sources: Iterable[Source], sections: Iterable[str]) -> None:
    """Refuse recipes and options that name no class for a section."""
    for section in sections:
        values = [source.content.get(section) for source in sources]
        if not any(isinstance(value, str) or "class_path" in (value or {}) for value in values):
            raise UserError(MISSING[section])


def check_options(sources: Iterable[Source], schema: dict[str, Any]) -> None:
    """Refuse what the schema does not allow, and name what is available; later sources overlay earlier ones."""
    walk = SchemaWalk(schema)
    for source in sources:
        try:
            for name, value in source.content.items():
                walk.option(name, value)
        except UserError as error:
            raise UserError(f"{source.where}{error}") from None


def refusals(message: str) -> str:
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


class SchemaWalk:
    """Comparison of options with the schema; remembers the class that each section names."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.sections = schema["properties"]
        self.definitions = schema.get("$defs", {})
        self.classes: dict[str, str] = {}

    def option(self, name: str, value: Any) -> None:
        """Check a section or an option of the top level."""
        if name not in self.sections:
            near = self.similar(name)
            meant = f"Did you mean {near[0]}?" if near else nearest(name, self.sections)
            raise UserError(f"there is no option {name}. {meant}")
        self.value(name, self.sections[name], value)

    def similar(self, name: str) -> list[str]:
        """Return the option within a section that resembles a name, such as [`--data.init_args.root`], or nothing."""
        inner: dict[str, str] = {}
        for section, node in self.sections.items():
            for variant in self.variants(node):
                prefix = f"--{section}.init_args" if class_name(variant) else f"--{section}"
                inner |= {option: f"{prefix}.{option}" for option in _options_of(variant)}
        return [inner[near] for near in difflib.get_close_matches(name, inner, n=1, cutoff=0.75)]

    def value(self, where: str, node: dict[str, Any], value: Any) -> None:
        """Check an option."""
        if isinstance(value, list):
            for item in value:
                self.value(where, node, item)
            return
        variants = list(self.variants(node))
        classes = {name: variant for variant in variants if (name := class_name(variant))}
        takes_text = any("string" in types_of(each) for each in (node, *node.get("anyOf", ())))
        if classes and (isinstance(value, dict) or (isinstance(value, str) and not takes_text)):
            self.section(where, classes, {"class_path": value} if isinstance(value, str) else value)
        elif isinstance(value, dict):
            each = next((v["additionalProperties"] for v in variants if v.get("additionalProperties")), None)
            known = dict.fromkeys(value, each) if each else {}
            self.options(where, next((v["properties"] for v in variants if "properties" in v), known), value)
        elif variants and not any(_fits(variant, value) for variant in variants):
            words = dict.fromkeys(word for variant in variants for word in _words(variant))
            expected = in_words(sorted(words, key=lambda word: word == "null"))
            if any("pattern" in variant for variant in variants):
                expected = node["description"]
            raise UserError(f"{where} is {'empty' if value is None else repr(value)}; expected {expected}")

    def section(self, where: str, classes: dict[str, Any], value: dict[str, Any]) -> None:
        """Check a class and its options."""
        named = value.get("class_path") or self.classes.get(where)
        if named is None:  # a checkpoint or a later recipe names it
            return
        self.classes[where] = str(named)
        module, _, name = str(named).rpartition(".")
        if name not in classes or module.partition(".")[0] not in ("", "tvr_lightning"):
            _check_exists(where, module, name, classes)
        known = _options_of(classes.get(name, {}))
        options = {key: item for key, item in value.items() if key not in ("class_path", "init_args", "dict_kwargs")}
        options |= value.get("init_args") or {}
        for option in options:
            if known and option not in known:
                having = sorted(other for other, kind in classes.items() if option in _options_of(kind))
                owners = f" ({', '.join(having)} {'has' if len(having) == 1 else 'have'} one)" if having else ""
                problem = f"{name} has no option {option}{owners}. {nearest(option, known)}"
                raise UserError(f"{where}.init_args.{option}: {problem}")
        self.options(f"{where}.init_args", known, options)

    def options(self, where: str, known: dict[str, Any], options: dict[str, Any]) -> None:
        """Check named options, unless the schema does not list them."""
        for name, value in options.items():
            if name in known:
                self.value(f"{where}.{name}", known[name], value)
            elif known:
                raise UserError(f"{where}.{name}: there is no such option. {nearest(name, known)}")

    def variants(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the alternatives of a node, with the items of lists in place of the lists."""
        if "$ref" in node:
            inner = [self.definitions[node["$ref"].rpartition("/")[2]]]
        elif isinstance(node.get("items"), dict):
            inner = [node["items"]]
        else:
            inner = node.get("anyOf") or node.get("prefixItems") or []
        for each in inner:
            yield from self.variants(each)
        if not inner:
            yield node


def _check_exists(where: str, module: str, name: str, classes: dict[str, Any]) -> None:
    full, reason, own = name, "which does not exist", " Name a class of your own with its module, as module.Class"
    if module:
        full, own = f"{module}.{name}", ""
        try:
            if hasattr(importlib.import_module(module), name):
                return
            reason = f"but {module} has no {name}"
        except ImportError as error:
            reason = f"but {module} cannot be imported ({error}; Python looks for modules in PYTHONPATH)"
    raise UserError(f"{where}.class_path is {full}, {reason}. {nearest(name, classes)}{own}")


def _options_of(variant: dict[str, Any]) -> dict[str, Any]:
    options = variant.get("properties", {})
    return options.get("init_args", {}).get("properties", {}) if class_name(variant) else options


def _fits(node: dict[str, Any], value: Any) -> bool:
    """Whether a value is allowed; only numbers, truth values, null, choices and patterns are compared."""
    if "enum" in node:
        return value in node["enum"]
    if "pattern" in node:
        return re.search(node["pattern"], str(value)) is not None
    kinds = types_of(node)
    if not kinds or "string" in kinds:
        return True
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in kinds
    try:
        number = float(value)  # YAML reads 1e-4 as text
    except (TypeError, ValueError):
        return False
    whole = "number" in kinds or ("integer" in kinds and number.is_integer())
    return whole and number in _range(node)


def _range(node: dict[str, Any]) -> Range:
    return Range(**{bound: node.get(key) for bound, key in BOUNDS.items()})


def _words(node: dict[str, Any]) -> list[str]:
    if "enum" in node:
        return [str(choice) for choice in node["enum"]]
    if class_name(node):
        return ["a class"]
    limits = str(_range(node))
    return [f"{NAMES[kind]} ({limits})" if limits and kind != "null" else NAMES[kind] for kind in types_of(node)]
