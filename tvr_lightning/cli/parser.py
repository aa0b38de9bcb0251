"""Parser of a command, made from the signature and the docstring of the command's function."""

from __future__ import annotations

import argparse
import difflib
import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import docstring_parser
from typing_extensions import override

from tvr_lightning.cli.commands import Command
from tvr_lightning.cli.types import convert, expected, metavar, value_type
from tvr_lightning.config.recipe_files import OptionError
from tvr_lightning.option_types import Range

NAMED = {"config": "RECIPE", "ckpt_path": "FILE"}
"""Placeholders of options whose value is a file, or a name of another kind."""
LONGEST_CHOICES = 60
"""Maximum number of characters of choices shown next to an option, since argparse does not wrap them."""


class CommandParser(argparse.ArgumentParser):
    """Parser that refuses arguments with an OptionError."""

    @override
    def error(self, message: str) -> NoReturn:
        if message.startswith("argument "):  # `argument --name: problem`
            message = message.removeprefix("argument ").replace(": ", " ", 1)
        raise OptionError(f"{self.prog.removeprefix('tvr ')}: {message}. `{self.prog} --help` explains all arguments.")


def parser_of(command: Command) -> CommandParser:
    """Return the parser of a command.

    Parameters before `/` are given without a name, and lists are repeated. Options that are not given are
    absent, so that the function's defaults apply, except paths, which are checked.
    """
    function = command.function()
    described = docstring_parser.parse(inspect.getdoc(function) or "")
    paragraphs = filter(None, (described.short_description, described.long_description))
    parser = CommandParser(
        prog=f"tvr {command.name}",
        description="\n\n".join(paragraphs),
        epilog=command.epilog(),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    helps = {item.arg_name: " ".join((item.description or "").split()) for item in described.params}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "overrides":
            continue
        hint, required, many = hints[name], parameter.default is parameter.empty, get_origin(hints[name]) is list
        text = _help(hint, parameter, helps[name]).replace("%", "%%")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            several = "+" if required else "*"
            parser.add_argument(name, type=partial(convert, hint), nargs=several if many else None, help=text)
        elif hint is bool:
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            shown = NAMED.get(name, metavar(hint) if len(metavar(hint)) <= LONGEST_CHOICES else "NAME")
            parser.add_argument(
                f"--{name.rstrip('_')}",  # --from for the keyword from_
                dest=name,
                type=partial(convert, hint),
                default=str(parameter.default) if isinstance(parameter.default, Path) else argparse.SUPPRESS,
                action="append" if many else "store",
                required=required,
                metavar=shown,
                help=text,
            )
    return parser


def _help(hint: Any, parameter: inspect.Parameter, text: str) -> str:
    """Return the description of an option with its valid values and its default."""
    text = text if text.endswith("...") else text.removesuffix(".")
    kind, limit = value_type(hint)
    notes = [expected(hint)] if isinstance(limit, Range) else []
    if get_origin(kind) is Literal and not all(choice in text for choice in get_args(kind)):
        shown = parameter.kind is not parameter.POSITIONAL_ONLY and len(metavar(hint)) <= LONGEST_CHOICES
        text = text if shown else f"{text}; one of {expected(hint)}"
    if parameter.default not in (parameter.empty, None, [], "", False):
        notes.append(f"default {parameter.default}")
    return f"{text} ({', '.join(notes)})" if notes else text


def parse(command: Command, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a command's own arguments by name, and the arguments that override options of recipes.

    Raises:
        OptionError: An argument does not exist, or a value is missing or not allowed.
    """
    parser = parser_of(command)
    own, overrides = _split_overrides(command, parser, words)
    return vars(parser.parse_args(own)), overrides


def _split_overrides(command: Command, parser: CommandParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into a command's own, and `--option=value` for those of recipes."""
    options = parser._option_string_actions
    own: list[str] = []
    overrides: list[str] = []
    given: set[str] = set()
    rest = iter(words)
    for word in rest:
        option, equals, _ = word.partition("=")
        if not option.startswith("--"):
            own.append(word)
        elif option in options:
            if option in given and not isinstance(options[option], argparse._AppendAction):
                parser.error(f"{option} is given more than once. Give it once")
            given.add(option)
            own.append(word)
            if not equals and options[option].nargs != 0:
                own.append(next(rest, ""))
        else:
            known = option[2:].partition(".")[0].rstrip("+") in command.sections
            near = difflib.get_close_matches(option, [*options, *(f"--{name}" for name in command.sections)], n=1)
            if not known and (near or not command.sections or "--config" not in options):
                meant = f"Did you mean {near[0]}? " if near else ""
                raise OptionError(
                    f"{command.name} has no option {option}. {meant}`tvr {command.name} --help` lists all options."
                )
            alone = equals or option == "--print_config"
            overrides.append(word if alone else f"{word}={next(rest, '')}")
    return own, overrides
