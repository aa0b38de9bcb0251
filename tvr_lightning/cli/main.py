"""The `tvr` program: find the command, parse its arguments, run it, and print errors that a user can fix as a line."""

import difflib
import inspect
import itertools
import os
import sys
from collections.abc import Sequence

from tvr_lightning import __version__
from tvr_lightning.cli.commands import COMMANDS, DATA, RECIPE, Command, CommandParser, parse
from tvr_lightning.config.check import check_before_parsing
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.errors import DISK_FULL, MissingAssetError, UserError
from tvr_lightning.runs.log import VERBOSE, is_verbose

FIRST_STEPS = """
Text-video retrieval papers, reproduced with PyTorch Lightning.

First steps:
  tvr index ~/Videos --weights openai                # search your own videos,
  tvr serve                                          # in the browser
  tvr data synth msrvtt                              # train without a dataset:
  tvr fit --config gare --config fixture             # on synthetic videos"""


def main(args: Sequence[str] | None = None) -> int:
    """Run the `tvr` program with `args` (None: those of the command line), and return its exit status.

    It is 2 for invalid arguments, 130 after an interruption from the keyboard, and 141 if the reader of the output has
    closed the pipe, as in a shell for a process ended by SIGPIPE.
    """
    words = list(sys.argv[1:] if args is None else args)
    if asked := {"-v", "--verbose"} & set(words):
        os.environ[VERBOSE] = "1"  # the processes of other devices inherit it
        words = [word for word in words if word not in asked]
    command = next((each for each in COMMANDS if words[: len(each.name.split())] == each.name.split()), None)
    try:
        status = list_commands(words) if command is None else run(command, words[len(command.name.split()) :])
        sys.stdout.flush()
    except (KeyboardInterrupt, SystemExit) as error:
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
            raise  # any exit but that of Lightning after an interruption
        advice = f"; {command.resume}" if command and command.resume else ""
        print(f"tvr: {command.name if command else 'the command'} was interrupted{advice}", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"tvr: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # the reader has closed the output, as `head` does after enough lines
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at the end
            return 141
        raise
    except OSError as error:
        if is_verbose() or not (error.filename or error.errno in DISK_FULL):
            raise
        file = f"{error.filename}: " if error.filename else ""
        print(f"tvr: {file}{error.strerror} (-v shows the traceback)", file=sys.stderr)
        return UserError.exit_status
    return status


def run(command: Command, words: list[str]) -> int:
    """Parse the arguments of a command, which follow its name, and run it."""
    if {"-h", "--help"} & set(words):
        print(CommandParser(command).format_help(), end="")
        return 0
    of_recipe = command.sections == RECIPE
    of_class = [word for word in words if word.startswith("--") and word.partition("=")[0].endswith(".help")]
    if (command.sections and of_class) or (of_recipe and "--help_all" in words):
        from tvr_lightning.config.recipe import recipe_parser

        recipe_parser().parse_args(words if of_class else ["--help"])  # prints the help and raises SystemExit
    options = parse(command, words)
    recipes = options.get("config", [])
    overrides = options.get("overrides", [])
    if of_recipe or recipes or overrides:
        # A checkpoint names its own classes; other commands without recipes refuse options of recipes themselves.
        complete = options.get("ckpt_path") or (not of_recipe and (not recipes or command.name == "evaluate"))
        needed = [section for section in ("model", "data") if section in command.sections and not complete]
        check_before_parsing(recipes, overrides, needed)
    parameters = inspect.signature(command.run).parameters.values()
    positional = [options.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in options]
    try:
        return command.run(*positional, **options) or 0
    except MissingAssetError as error:
        raise MissingAssetError(f"{error}{_hint(command, recipes)}") from error


def list_commands(words: Sequence[str]) -> int:
    """Print the list of commands, or refuse arguments that do not begin with a command."""
    if words and words[0] == "--version":
        print(__version__)
        return 0
    names = [command.name for command in COMMANDS]
    only_data = words[:1] == ["data"]
    both = " ".join(words[:2])
    near = difflib.get_close_matches(both, [name for name in names if " " in name], n=1, cutoff=0.75)
    asked = both if near or only_data else " ".join(words[:1])
    if asked not in ("", "-h", "--help", "data", "data -h", "data --help"):
        near = near or difflib.get_close_matches(asked, names, n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise UserError(f"{asked} is not a command. {meant}`tvr --help` lists all commands.")
    print("usage: tvr data COMMAND [options]" if only_data else f"usage: tvr COMMAND [options]\n{FIRST_STEPS}")
    for group, commands in itertools.groupby(COMMANDS, lambda command: command.group):
        if group == DATA or not only_data:
            print(f"\n{group}:", *(f"  {command.name:<16} {command.summary}" for command in commands), sep="\n")
    if only_data:
        return 0
    print(
        "\nEach command has its own --help with an example. fit, validate, test, and predict take --config RECIPE:\n"
        "a file, or the name of one of this project's recipes. Repeat --config to combine recipes; the last one wins.\n"
        "-v also shows tracebacks and messages of other libraries; --version shows the version."
    )
    return 0


def _hint(command: Command, recipes: Sequence[str]) -> str:
    if not recipes and command.sections != RECIPE:
        return ""
    named = (name for name in recipes if "class_path" in (read_recipe(name).get("model") or {}))
    return (
        "\n\nTo start without data or weights:\n"
        "  tvr data synth msrvtt --root fixture --videos 500 --seed 0\n"
        f"  tvr {command.name} --config {next(named, 'recipes/clip4clip.yaml')} --config recipes/fixture.yaml"
    )
