"""Parsing of a command's arguments, with a one-line error message before data or models are loaded if possible."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from tvr_lightning.cli.verb_help import option_names, read_verb
from tvr_lightning.cli.verb_values import refused
from tvr_lightning.cli.verbs import Verb

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def check_recipes(verb: Verb, words: Sequence[str]) -> None:
    """Check the recipes, options and checkpoints of a command before torch is imported.

    Args:
        verb: Command.
        words: Arguments after the command.

    Raises:
        RecipeError: A file is missing or not a recipe, the command has no arguments, or a recipe contains an unknown
            option.
    """
    from tvr_lightning.config.check import check_options, sources_of
    from tvr_lightning.config.recipe_files import (
        CHECKPOINTS,
        EVALUATING,
        RecipeError,
        nothing_to_run,
        read_recipe,
        recipes_of,
    )
    from tvr_lightning.config.schema import cached_schema

    recipes = recipes_of(words)
    for recipe in recipes:
        read_recipe(recipe)
    schema = cached_schema()
    if schema is not None:
        own = [word for recipe in recipes for word in ("--config", recipe)] + part_overrides(verb, list(words))[1]
        check_options(sources_of(own if verb.run else words), schema)
    if verb.words not in ("fit", *EVALUATING):
        return
    if not words:
        raise nothing_to_run(verb.words)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        path = value if equals else following
        local = name == "--ckpt_path" and path not in CHECKPOINTS and "://" not in path
        if local and not Path(path).exists():
            raise RecipeError(f"{path}: no such checkpoint; looked for it at {Path(path).absolute()}")


def part_overrides(verb: Verb, words: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments after a command into its own and those that override options of the recipes."""
    sections = tuple(f"--{section}." for section in verb.sections)
    if not sections:
        return words, []
    own, overrides = [], []
    left = iter(words)
    for word in left:
        if not word.startswith(sections):
            own.append(word)
        elif "=" in word:
            overrides.append(word)
        else:
            overrides.append(f"{word}={next(left, '')}")
    return own, overrides


def parse(verb: Verb, words: list[str]) -> dict[str, Any] | str:
    """Return the options of one of this project's own commands by name, or an error message about the first error."""
    assert verb.run is not None
    options = {option.replace("-", "_"): option for option in option_names(verb.run, verb.positional)}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        known = options.get(name.replace("-", "_"))  # `--num-workers` and `--num_workers` are equivalent
        if word.startswith("--") and known is not None:
            words[place] = f"{known}{equals}{value}"
        elif name.partition(".")[0].rstrip("+").replace("-", "_") in options:  # option of a class, or `--name+`
            continue
        elif word.startswith("--") and not any(option.startswith(name) for option in options.values()):
            near = difflib.get_close_matches(name, options.values(), n=1)
            meant = f"Did you mean {near[0]}? " if near else ""
            return f"{verb.words} has no option {name}. {meant}`tvr {verb.words} --help` lists all options."
    said = refused(words, read_verb(verb.run).parameters, verb.positional)
    if said is not None:
        return f"{verb.words}: {said}"
    from jsonargparse import ArgumentError

    from tvr_lightning.progress import shown

    with shown(f"{verb.words}: loading"):
        parser = parser_of(verb)
    try:
        return parser.instantiate(parser.parse_args(words)).as_dict()  # classes such as that of a normalization
    except ArgumentError as error:
        return f"{verb.words}: {_refusal(verb, str(error))}"


def parser_of(verb: Verb) -> ArgumentParser:
    """Return the parser of one of this project's own commands, built from its function's signature and docstring."""
    import docstring_parser
    from jsonargparse import ArgumentParser

    function = verb.function()
    described = docstring_parser.parse(function.__doc__ or "")
    parser = ArgumentParser(prog=f"tvr {verb.words}", description=described.short_description, exit_on_error=False)
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    helps = {item.arg_name: item.description for item in described.params}
    for name in verb.positional:
        many = get_origin(hints[name]) in (list, Sequence)
        kind = get_args(hints[name])[0] if many else hints[name]
        if many and parameters[name].default is not inspect.Parameter.empty:
            parser.add_argument(name, type=kind, help=helps.get(name), nargs="*", default=[])
        else:
            parser.add_argument(name, type=kind, help=helps.get(name), nargs="+" if many else None)
    skip: set[str | int] = {*verb.positional, "overrides"}
    # Repeatable as in Lightning's commands: `--config a.yaml --config b.yaml`.
    for name in [name for name in ("config", *verb.repeated) if name in hints]:
        required = parameters[name].default is inspect.Parameter.empty
        parser.add_argument(f"--{name}", type=str, action="append", required=required, help=helps.get(name))
        skip.add(name)
    for name, parameter in parameters.items():
        if hints[name] is bool and parameter.default is False:
            parser.add_argument(f"--{name}", dest=name, action="store_true", help=helps.get(name))
            skip.add(name)
    for name in [name for name in parameters if name.endswith("_")]:  # keywords of Python
        option = f"--{name.rstrip('_')}"
        parser.add_argument(option, dest=name, type=hints[name], required=True, help=helps.get(name))
        skip.add(name)
    parser.add_function_arguments(function, skip=skip, as_group=False)
    return parser


def _refusal(verb: Verb, message: str) -> str:
    """Return the parser's error for a value in one line, with the expected value but without the attempted types."""
    from tvr_lightning.config.check import refusals

    assert verb.run is not None
    found = re.search(r'Parser key "(\w+)":', message)
    value = re.search(r"(?:Got|Given) value: (.*)\Z", message.strip())
    kinds = {parameter.name: parameter for parameter in read_verb(verb.run).parameters}
    parameter = kinds.get(found[1]) if found else None
    if parameter is None or value is None:
        return " ".join(refusals(message).split())
    name = parameter.name if parameter.name in verb.positional else parameter.option
    return f"{name} is {value[1]}; expected {parameter.expected}"
