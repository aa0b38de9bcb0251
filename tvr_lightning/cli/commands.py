"""The commands of `tvr`, and their parsers, made from the signatures and docstrings of the commands' functions."""

import argparse
import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_type_hints

from typing_extensions import override

from tvr_lightning.cli import data, evaluate, features, search, tables, train
from tvr_lightning.cli.options import Option
from tvr_lightning.config.check import SchemaWalk
from tvr_lightning.config.schema import cached_schema
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Range, in_words

RECIPE = ("model", "data", "trainer", "results", "checkpoints", "eval_memory", "seed_everything", "print_config")
AGAIN = "rerun the command to resume"
RESUME = "rerun the command with --checkpoints.resume=true to resume from the last checkpoint"


@dataclass(frozen=True)
class Command:
    """Command of the `tvr` program.

    Attributes:
        run: Function whose signature and docstring define the options; its module imports no torch.
        sections: Sections of the recipe whose options can also be given; the function gets them as `overrides`.
        resume: Advice for resuming a long-running command after an interruption.
    """

    name: str
    run: Callable[..., int | None]
    sections: tuple[str, ...] = ()
    resume: str | None = None

    @property
    def summary(self) -> str:
        """Line in the list of commands."""
        return str(self.run.__doc__).partition("\n")[0].removesuffix(".")


class CommandParser(argparse.ArgumentParser):
    """Parser that refuses arguments with an UserError."""

    @override
    def error(self, message: str) -> NoReturn:
        if message.startswith("argument "):  # `argument --name: problem`
            message = message.removeprefix("argument ").replace(": ", " ", 1)
        raise UserError(f"{self.prog.removeprefix('tvr ')}: {message}. `{self.prog} --help` explains all arguments.")


def parser_of(command: Command) -> CommandParser:
    """Return the parser of a command.

    Parameters before `/` are given without a name, and lists are repeated. Options that are not given are
    absent, so that the function's defaults apply, except paths, which are checked.
    """
    shown = " and ".join(f"--{section}.*" for section in command.sections)
    epilog = f"Options {shown} override those of the recipes, as for `tvr fit`." if shown else None
    parser = CommandParser(
        prog=f"tvr {command.name}",
        description=inspect.getdoc(command.run),
        epilog=train.recipes_and_examples() if command.sections == RECIPE else epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    hints = get_type_hints(command.run, include_extras=True)
    for name, parameter in inspect.signature(command.run).parameters.items():
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
    unnamed = [choice for choice in option.choices if choice not in option.help]
    notes = [option.expected] if unnamed or isinstance(option.limit, Range) else []
    if option.many and parameter.kind is not parameter.POSITIONAL_ONLY:
        notes.append("can be repeated")
    if parameter.default not in (parameter.empty, None, [], "", False):
        notes.append(f"default {parameter.default}")
    return (f"{option.help} ({', '.join(notes)})" if notes else option.help).replace("%", "%%")


def parse(command: Command, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a command's own arguments by name, and `--option=value` for each option of recipes."""
    parser, rest = parser_of(command), iter(words)
    options = parser._option_string_actions
    own: list[str] = []
    overrides: list[str] = []
    given: set[str] = set()
    for word in rest:
        option, equals, _ = word.partition("=")
        if option in options:
            if option in given and not isinstance(options[option], argparse._AppendAction):
                parser.error(f"{option} is given more than once. Give it once")
            given.add(option)
            own.append(word)
        elif option.startswith("--"):
            if not command.sections or option[2:].partition(".")[0].rstrip("+") not in {*RECIPE, *command.sections}:
                advice = f"{_hint(command, option, options)}`tvr {command.name} --help` lists all options."
                raise UserError(f"{command.name} has no option {option}. {advice}")
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


def completion(shell: Annotated[Literal["bash", "zsh", "tcsh"], "shell of the script"], /) -> None:
    """Print a script that completes commands and options in a shell, as for eval "$(tvr completion bash)"."""
    try:
        import shtab
    except ImportError as error:
        raise UserError("tvr completion needs shtab: pip install 'tvr-lightning[completion]'") from error

    whole = argparse.ArgumentParser(prog="tvr")
    commands = whole.add_subparsers()
    groups = {"": commands, "data": commands.add_parser("data", help="commands for datasets").add_subparsers()}
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        parser = parser_of(command)
        for action in parser._actions:
            if action.metavar in ("FILE", "FOLDER", "PATH", "RECIPE"):
                action.complete = shtab.DIRECTORY if action.metavar == "FOLDER" else shtab.FILE  # type: ignore[attr-defined]
        groups[group].add_parser(name, help=command.summary, parents=[parser], add_help=False)
    print(shtab.complete(whole, shell))


COMMANDS = (
    Command("fit", train.fit, RECIPE, RESUME),
    Command("validate", train.validate, RECIPE),
    Command("test", train.run_test, RECIPE),
    Command("predict", train.predict, RECIPE),
    Command("evaluate", evaluate.evaluate, ("data", "normalization")),
    Command("data synth", data.synth),
    Command("data download", data.download, resume=AGAIN),
    Command("data import", data.import_, resume=AGAIN),
    Command("data check", data.check, ("data",)),
    Command("data compress", data.compress, ("data",), AGAIN),
    Command("data stats", data.stats, ("data",)),
    Command("data show", data.show),
    Command("extract", features.extract, ("model", "data"), AGAIN),
    Command("caption", features.caption, ("data",), AGAIN),
    Command("convert", train.convert),
    Command("schema", train.schema),
    Command("push", train.push),
    Command("audit", train.audit, ("model", "data")),
    Command("index", search.index),
    Command("search", search.search),
    Command("serve", search.serve),
    Command("published", tables.published),
    Command("reproduce", tables.reproduce, resume=AGAIN),
    Command("report", tables.report),
    Command("verify-released", tables.verify_released),
    Command("profile", tables.profile, ("model", "data", "trainer")),
    Command("completion", completion),
)
