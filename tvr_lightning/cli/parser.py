"""Parser of a command, which jsonargparse makes from the signature and the docstring of the command's function."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

import docstring_parser
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter

from tvr_lightning.cli.types import expected, is_list, metavar, plain
from tvr_lightning.config.check import refusals
from tvr_lightning.config.recipe_files import OptionError

if TYPE_CHECKING:
    from tvr_lightning.cli.commands import Command

NAMED = {"config": "RECIPE", "ckpt_path": "FILE"}
"""Placeholders of options whose value is a file, or a name of another kind."""
LONGEST_CHOICES = 60
"""Maximum number of characters of choices shown next to an option, since argparse does not wrap them."""


class HelpFormatter(DefaultHelpFormatter):
    """Help with the descriptions of `parser_of` alone, and with the lines of lists as they are."""

    def _get_help_string(self, action: Any) -> str:
        return action.help or ""

    def _format_action_invocation(self, action: Any) -> str:
        strings = action.option_strings
        action.option_strings = [option for option in strings if not option.endswith("+")]  # of lists; internal
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = strings

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        filled = [
            part if "\n" in part else super(HelpFormatter, self)._fill_text(part, width, "") for part in paragraphs
        ]
        return "\n\n".join(filled)


def parser_of(command: Command, function: Callable[..., int]) -> ArgumentParser:
    """Return the parser of a command.

    Parameters before `/` are given without a name, and lists are repeated. `overrides` takes options of recipes, which
    `split_overrides` removes first.
    """
    described = docstring_parser.parse(inspect.getdoc(function) or "")
    paragraphs = filter(None, (described.short_description, described.long_description))
    parser = ArgumentParser(
        prog=f"tvr {command.name}",
        description="\n\n".join(paragraphs),
        epilog=command.epilog(),
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    helps = {item.arg_name: " ".join((item.description or "").split()) for item in described.params}
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "overrides":
            continue
        hint, required = hints[name], parameter.default is parameter.empty
        default = None if required else parameter.default
        positional = parameter.kind is parameter.POSITIONAL_ONLY
        said = _help(hint, default, helps[name], positional)
        options: dict[str, Any] = {"help": said.replace("%", "%%")}
        if positional:
            options["metavar"] = name
            if is_list(hint):
                options |= {"nargs": "+" if required else "*", "type": hint.__args__[0]}
            parser.add_argument(name, **{"type": hint} | options)
        elif hint is bool:
            parser.add_argument(f"--{name}", action="store_true", **options)
        else:
            shown = NAMED.get(name) or (metavar(hint) if len(metavar(hint)) <= LONGEST_CHOICES else "NAME")
            option = f"--{name.rstrip('_')}"  # --from for the keyword from_
            parser.add_argument(
                option, dest=name, type=hint, default=default, required=required, metavar=shown, **options
            )
    return parser


def _help(hint: Any, default: Any, said: str, positional: bool) -> str:
    """Return the description of an option with its valid values and its default."""
    said = said if said.endswith("..") else said.removesuffix(".")
    choices = metavar(hint).strip("{}").split(",")
    if len(metavar(hint)) > LONGEST_CHOICES or (positional and len(choices) > 1):
        said = said if all(choice in said for choice in choices) else f"{said}; one of {expected(hint)}"
    limited = metavar(hint) in ("N", "X") and expected(hint) not in ("a whole number", "a number")
    notes = [expected(hint)] if limited else []
    if default not in (None, [], "", False):
        notes.append(f"default {default}")
    repeated = "; can be repeated" if is_list(hint) and not positional and "repeated" not in said else ""
    return f"{said}{repeated} ({', '.join(notes)})" if notes else f"{said}{repeated}"


def split_overrides(
    command: Command, function: Callable[..., int], words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into its own and those that override options of the recipes.

    Raises:
        OptionError: An option does not exist, or is given twice although it takes one value.
    """
    hints = get_type_hints(function)
    options = {f"--{name.rstrip('_')}": hint for name, hint in hints.items() if name not in ("return", "overrides")}
    own: list[str] = []
    overrides: list[str] = []
    given: set[str] = set()
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option == "--help":
            own.append(word)
        elif option in options:
            if option in given and not is_list(options[option]):
                raise OptionError(f"{command.name}: {option} is given more than once. Give it once.")
            given.add(option)
            appended = f"{option}+" if is_list(options[option]) else option
            own.append(f"{appended}{equals}{value}")
            if not equals and options[option] is not bool:
                own.append(next(rest, ""))
        elif option[2:].partition(".")[0].rstrip("+") in command.sections:
            alone = equals or option == "--print_config"
            overrides.append(word if alone else f"{word}={next(rest, '')}")
        else:
            near = difflib.get_close_matches(option, [*options, *(f"--{name}" for name in command.sections)], n=1)
            if not near and command.sections and "config" in hints:  # the check of recipes knows more options
                overrides.append(word if equals else f"{word}={next(rest, '')}")
                continue
            meant = f"Did you mean {near[0]}? " if near else ""
            raise OptionError(
                f"{command.name} has no option {option}. {meant}`tvr {command.name} --help` lists all options."
            )
    return own, overrides


def parse(command: Command, function: Callable[..., int], words: Sequence[str]) -> dict[str, Any]:
    """Return the values of a command's own arguments by name.

    Raises:
        OptionError: A value is missing or invalid.
    """
    parser = parser_of(command, function)
    try:
        found = parser.parse_args(list(words))
    except ArgumentError as error:
        raise OptionError(f"{command.name}: {_refusal(parser, function, words, str(error))}") from error
    return {name: plain(value) for name, value in vars(found).items()}


def _refusal(parser: ArgumentParser, function: Callable[..., int], words: Sequence[str], message: str) -> str:
    """Return the parser's error in one line: the argument, its value, and what is expected."""
    hints = get_type_hints(function)
    if found := re.search(r"required: ([\w, -]+)|[Kk]ey \"(\w+)\" is required", message):
        name = (found[1] or found[2]).split(", ")[0].removeprefix("--")
        actions = {action.dest.rstrip("_"): action for action in parser._actions}
        action = actions[name.rstrip("_")]
        shown = action.option_strings[0] if action.option_strings else action.dest
        return f"{shown} must be given: {action.help}"
    if found := re.search(r"unrecognized arguments: (\S+)", message):
        return f"takes no argument {found[1]}; `{parser.prog} --help` lists all"
    key, value = re.search(r'Parser key "(\w+)"', message), re.search(r"Given value: (.*)\Z", message.strip())
    if key is None or key[1] not in hints:
        return " ".join(refusals(message).split())
    if path := re.search(r"Not of type \w+: (.*; .*)", message):
        # The parser removes a value from the beginning of the message of an option that may be null.
        return path[1] if not path[1].startswith(("is ", "cannot ")) or value is None else f"{value[1]} {path[1]}"
    name, hint = key[1], hints[key[1]]
    option = f"--{name.rstrip('_')}"
    own = any(option in action.option_strings for action in parser._actions)
    given = value[1] if value else _given(words, option) if own else next(iter(words), "")
    return f"{option if own else name} is {given or 'empty'}; expected {expected(hint)}"


def _given(words: Sequence[str], option: str) -> str:
    """Return the last value of an option."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    values = [word.partition("=")[2] if "=" in word else following for word, following in pairs
              if word.partition("=")[0].rstrip("+") == option]  # fmt: skip
    return values[-1] if values else ""
