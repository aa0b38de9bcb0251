"""The commands of `tvr`, and their parsers, made from the signatures and docstrings of the commands' functions."""

import argparse
import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from typing_extensions import override

from tvr_lightning.cli import data, evaluate, features, search, tables, train
from tvr_lightning.cli.options import PathKind
from tvr_lightning.config.check import Merger
from tvr_lightning.config.schema import cached_schema
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Range, in_words, parts_of

RECIPE = ("model", "data", "trainer", "results", "checkpoints", "seed_everything", "print_config")
NAMES = {int: ("N", "a whole number"), float: ("X", "a number"), Path: ("PATH", ""), str: ("TEXT", ""), bool: ("", "")}
LAST = "runs/gare-msrvtt/version_0/checkpoints/last.ckpt"
AGAIN = "rerun the command to resume"
RESUME = "rerun the command with --checkpoints.resume=true to resume from the last checkpoint"


@dataclass(frozen=True)
class Command:
    """Command of the `tvr` program.

    Attributes:
        run: Function whose signature and docstring define the options; its module imports no torch.
        group: Heading in the list of commands.
        example: Arguments of an example.
        sections: Sections of the recipe whose options can also be given; the function gets them as `overrides`.
        resume: Advice for resuming a long-running command after an interruption.
    """

    name: str
    run: Callable[..., int | None]
    group: str
    example: str
    sections: tuple[str, ...] = ()
    resume: str | None = None

    @property
    def summary(self) -> str:
        """Line in the list of commands."""
        return str(self.run.__doc__).partition("\n")[0].removesuffix(".")


def _read(kind: type, allowed: Any, expected: str, text: str) -> Any:
    with suppress(ValueError):
        value = kind(text)
        if not allowed or value in allowed:
            return value
    raise argparse.ArgumentTypeError(f"is {text or 'empty'}; expected {expected}")


class CommandParser(argparse.ArgumentParser):
    """Parser of the arguments of a command, which are in `known` by name; refuses others with a UserError."""

    def __init__(self, command: Command) -> None:
        sections = ", ".join(f"--{section}.*" for section in command.sections)
        more = f"Options {sections} override those of the recipes, as for `tvr fit`.\n\n" if sections else ""
        more = train.recipes_and_options() if command.sections == RECIPE else more
        super().__init__(
            prog=f"tvr {command.name}",
            description=inspect.getdoc(command.run),
            epilog=f"{more}example:\n  tvr {command.name} {command.example}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        self.known: dict[str, argparse.Action] = {}
        hints = get_type_hints(command.run, include_extras=True)
        for parameter in inspect.signature(command.run).parameters.values():
            if parameter.name != "overrides":
                self._add(parameter, hints[parameter.name])
        if command.sections == RECIPE:
            self.add_argument("--help_all", action="help", help="print all options of recipes")  # see `main.run`

    def _add(self, parameter: inspect.Parameter, hint: Any) -> None:
        """Add the argument of a parameter; those before `/` are given without a name, and lists are repeated.

        Arguments that are not given are absent, so that the function's defaults apply, except paths, which are checked.
        """
        parts = list(parts_of(hint))
        default = parameter.default
        required = default is parameter.empty
        named = parameter.kind is not parameter.POSITIONAL_ONLY
        many = any(get_origin(part) is list for part in parts)
        choices = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
        span = next((part for part in parts if isinstance(part, Range)), None)
        path = next((part for part in parts if isinstance(part, PathKind)), None)
        kind = next((part for part in parts if part in NAMES), str)
        *given, text = [note for note in hint.__metadata__ if isinstance(note, str)]
        placeholder, expected = ("NAME", in_words(choices)) if choices else NAMES[kind]
        placeholder = path.kind.split()[-1].upper() if path else placeholder
        expected = f"{expected} of {span}" if span else expected
        notes = [expected] if span or any(choice not in text for choice in choices) else []
        notes += ["can be repeated"] if many and named else []
        notes += [] if required or default in (None, [], "", False) else [f"default {default}"]
        options: dict[str, Any] = {"help": (f"{text} ({', '.join(notes)})" if notes else text).replace("%", "%%")}
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["type"] = path.read if path else partial(_read, kind, choices or span, expected)
            options["metavar"] = "".join(given) or placeholder if named else None
        if many:
            options |= {"action": "extend", "nargs": 1 if named else "+" if required else "*"}
        if named:
            options |= {"dest": parameter.name, "required": required}
        if isinstance(default, Path):
            options["default"] = str(default)
        name = f"--{parameter.name.rstrip('_')}" if named else parameter.name  # --from for the keyword from_
        self.known[name] = self.add_argument(name, **options)

    @override
    def error(self, message: str) -> NoReturn:
        if message.startswith("argument "):  # `argument --name: problem`
            message = message.removeprefix("argument ").replace(": ", " ", 1)
        raise UserError(f"{self.prog.removeprefix('tvr ')}: {message}. `{self.prog} --help` explains all arguments.")


def parse(command: Command, words: Sequence[str]) -> dict[str, Any]:
    """Return the values of a command's arguments; `overrides` has `--option=value` for each option of recipes."""
    parser = CommandParser(command)
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    for name in dict.fromkeys(names):
        if name in parser.known:
            if names.count(name) > 1 and parser.known[name].nargs != 1:
                parser.error(f"{name} is given more than once. Give it once")
        elif command.sections and name[2:].partition(".")[0].rstrip("+") in {*RECIPE, *command.sections}:
            parser.add_argument(name, dest="overrides", action="append", nargs="?", const="", type=f"{name}=".__add__)
        else:
            advice = f"{_hint(command, name, parser.known)}`tvr {command.name} --help` lists all options."
            raise UserError(f"{command.name} has no option {name}. {advice}")
    return vars(parser.parse_args(words))


def _hint(command: Command, option: str, own: Iterable[str]) -> str:
    """Return the option of a command that an unknown one resembles, or else the commands that have the unknown one."""
    near = difflib.get_close_matches(option, [*own, *(f"--{name}" for name in command.sections)], 1, 0.7)
    if not near and command.sections and (schema := cached_schema()) is not None:
        near = Merger(schema).similar(option.removeprefix("--"))
    if near:
        return f"Did you mean {near[0]}? "
    others = [f"tvr {other.name}" for other in COMMANDS if option in CommandParser(other).known]
    return f"It is an option of {in_words(others)}. " if others else ""


TRAIN = "Train and test"
DATA = "Datasets"
SEARCH = "Features and search"
TABLES = "Tables and reports"
SHARE = "Share and extend"
COMMANDS = (
    Command("fit", train.fit, TRAIN, "--config gare --config fixture", RECIPE, RESUME),
    Command("validate", train.validate, TRAIN, f"--ckpt_path {LAST}", RECIPE),
    Command("test", train.run_test, TRAIN, f"--ckpt_path {LAST}", RECIPE),
    Command("predict", train.predict, TRAIN, f"--ckpt_path {LAST}", RECIPE),
    Command("evaluate", evaluate.evaluate, TRAIN, "scores.npy --data MSRVTT", ("data", "normalization")),
    Command("audit", train.audit, TRAIN, f"--ckpt_path {LAST}", ("model", "data")),
    Command("data synth", data.synth, DATA, "msrvtt --videos 100"),
    Command("data download", data.download, DATA, "msrvtt", resume=AGAIN),
    Command("data import", data.import_, DATA, "msrvtt --from hub-msrvtt --root datasets", resume=AGAIN),
    Command("data check", data.check, DATA, "--config data/msrvtt", ("data",)),
    Command("data compress", data.compress, DATA, "--config data/msrvtt --out small", ("data",), AGAIN),
    Command("data stats", data.stats, DATA, "--config data/msrvtt", ("data",)),
    Command("data show", data.show, DATA, "video7010.mp4 --out page.png"),
    Command("index", search.index, SEARCH, "~/Videos --out index --weights openai"),
    Command("search", search.search, SEARCH, '"a dog catches a frisbee" --index index'),
    Command("serve", search.serve, SEARCH, "--index index"),
    Command("extract", features.extract, SEARCH, "--config gare --out features", ("model", "data"), AGAIN),
    Command("caption", features.caption, SEARCH, "--config data/msrvtt", ("data",), AGAIN),
    Command("published", tables.published, TABLES, "--paper gare --dataset MSR-VTT"),
    Command("reproduce", tables.reproduce, TABLES, "gare-1 --fixture", resume=AGAIN),
    Command("report", tables.report, TABLES, "runs"),
    Command("profile", tables.profile, TABLES, "--config gare", ("model", "data", "trainer")),
    Command("verify-released", tables.verify_released, TABLES, "checkpoints"),
    Command("push", train.push, SHARE, f"{LAST} user/name"),
    Command("export", train.export, SHARE, f"{LAST} onnx"),
    Command("convert", train.convert, SHARE, "xpool.pth xpool.ckpt"),
    Command("schema", train.schema, SHARE, "> recipe.schema.json"),
)
