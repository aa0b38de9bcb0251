"""Parser of a command, made from the signature and the docstring of the command's function."""

import argparse
import difflib
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from typing_extensions import override

from tvr_lightning.cli.commands import COMMANDS, RECIPE, Command
from tvr_lightning.cli.options import Option
from tvr_lightning.cli.train import recipes_and_examples
from tvr_lightning.config.check import SchemaWalk
from tvr_lightning.config.recipe_files import OptionError
from tvr_lightning.config.schema import cached_schema
from tvr_lightning.option_types import Range, in_words


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
    shown = " and ".join(f"--{section}.*" for section in command.sections)
    epilog = f"Options {shown} override those of the recipes, as for `tvr fit`." if shown else None
    parser = CommandParser(
        prog=f"tvr {command.name}",
        description=inspect.getdoc(function),
        epilog=recipes_and_examples() if command.sections == RECIPE else epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "overrides":
            continue
        option, required = Option(hints[name]), parameter.default is parameter.empty
        text = _help(option, parameter)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            several = "+" if required else "*"
            parser.add_argument(name, type=option, nargs=several if option.many else None, help=text)
        elif option.kind is bool:
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            parser.add_argument(
                f"--{name.rstrip('_')}",  # --from for the keyword from_
                dest=name,
                type=option,
                default=str(parameter.default) if isinstance(parameter.default, Path) else argparse.SUPPRESS,
                action="append" if option.many else "store",
                required=required,
                metavar={"config": "RECIPE", "ckpt_path": "FILE"}.get(name, option.metavar),
                help=text,
            )
    if command.sections == RECIPE:
        parser.add_argument("--help_all", action="help", help="print all options of recipes")  # see `main.run`
    return parser


def _help(option: Option, parameter: inspect.Parameter) -> str:
    """Return the description of an option with its valid values and its default."""
    unnamed = [choice for choice in option.choices if choice not in option.help]
    notes = [option.expected] if unnamed or isinstance(option.limit, Range) else []
    if option.many and parameter.kind is not parameter.POSITIONAL_ONLY:
        notes.append("can be repeated")
    if parameter.default not in (parameter.empty, None, [], "", False):
        notes.append(f"default {parameter.default}")
    return (f"{option.help} ({', '.join(notes)})" if notes else option.help).replace("%", "%%")


def parse(command: Command, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a command's own arguments by name, and `--option=value` for each option of recipes.

    Raises:
        OptionError: An argument does not exist, or a value is missing or not allowed.
    """
    parser = parser_of(command)
    options = parser._option_string_actions
    own: list[str] = []
    overrides: list[str] = []
    given: set[str] = set()
    rest = iter(words)
    for word in rest:
        option, equals, _ = word.partition("=")
        if option in options:
            if option in given and not isinstance(options[option], argparse._AppendAction):
                parser.error(f"{option} is given more than once. Give it once")
            given.add(option)
            own.append(word)
        elif option.startswith("--"):
            if not command.sections or option[2:].partition(".")[0].rstrip("+") not in {*RECIPE, *command.sections}:
                hint = _hint(command, option, options)
                raise OptionError(
                    f"{command.name} has no option {option}. {hint}`tvr {command.name} --help` lists all options."
                )
            alone = equals or option == "--print_config"
            overrides.append(word if alone else f"{word}={next(rest, '')}")
        else:
            own.append(word)
    return vars(parser.parse_args(own)), overrides


def _hint(command: Command, option: str, own: Iterable[str]) -> str:
    """Return the option of a command that an unknown one resembles, or else the commands that have the unknown one."""
    near = difflib.get_close_matches(option, [*own, *(f"--{name}" for name in command.sections)], 1, 0.7)
    if not near and command.sections and (schema := cached_schema()) is not None:
        near = SchemaWalk(schema).similar(option.removeprefix("--"))
    if near:
        return f"Did you mean {near[0]}? "
    others = [f"tvr {other.name}" for other in COMMANDS if option in parser_of(other)._option_string_actions]
    return f"It is an option of {in_words(others)}. " if others else ""
