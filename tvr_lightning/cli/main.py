"""The `tvr` program: Lightning's fit, validate, test and predict, and this project's own commands.

The latter are functions with typed arguments, from which jsonargparse builds the options.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tvr_lightning.cli.lightning_help import lightning_help
from tvr_lightning.cli.list_of_verbs import list_verbs
from tvr_lightning.cli.parsing import check_recipes, parse, part_overrides
from tvr_lightning.cli.verb_help import verb_help
from tvr_lightning.cli.verbs import VERBS, Verb
from tvr_lightning.quiet import VERBOSE, is_verbose, quieten

if TYPE_CHECKING:
    from tvr_lightning.audit.run import AuditedCLI


UNREAD = 141
"""Exit status if the reader of a pipe has closed it, as in a shell for a process ended by SIGPIPE."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the `tvr` program.

    Args:
        args: Arguments after `tvr`; None for those of the command line.

    Returns:
        Exit status: 130 after an interruption from the keyboard, 141 if the reader of the output has closed the pipe.
        Invalid options raise SystemExit with status 2, as in argparse.
    """
    words = list(sys.argv[1:] if args is None else args)
    if asked := {"-v", "--verbose"} & set(words):
        # An environment variable is also visible to the processes of other devices, which repeat the command line.
        os.environ[VERBOSE] = "1"
        words = [word for word in words if word not in asked]
        if args is None:
            sys.argv[1:] = words
    if args is not None:
        return _verb(words, from_command_line=False)
    try:
        status = _verb(words, from_command_line=True)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is flushed at the end
        return UNREAD
    return status


def _nobody_reads() -> bool:
    """Return whether the output is a pipe whose reader has closed it, as `head` does after enough lines."""
    if not hasattr(select, "poll"):
        return False
    looked = select.poll()
    looked.register(sys.stdout.fileno(), 0)  # errors and hang-ups are reported for any event mask
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in looked.poll(0))


def _verb(words: list[str], from_command_line: bool) -> int:
    verb = next((v for v in VERBS if words[: len(v.words.split())] == v.words.split()), None)
    if verb is None:
        return list_verbs(words)
    rest = words[len(verb.words.split()) :]
    try:
        return _guard(lambda: _run(verb, rest, from_command_line), partial(_hint, verb, rest))
    except KeyboardInterrupt:
        return _interrupted(verb)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning exits this way
            return _interrupted(verb)
        raise


def _run(verb: Verb, rest: list[str], from_command_line: bool) -> int:
    if verb.run is None:
        if {"-h", "--help"} & set(rest):
            from tvr_lightning.config.recipe_files import RECIPES

            print(lightning_help(verb.words, verb.help, RECIPES))
            return 0
        if "--help_all" in rest:
            return _help_all(verb.words)
        check_recipes(verb, rest)
        return _lightning(verb.words, rest, from_command_line)
    if {"-h", "--help"} & set(rest):
        print(verb_help(verb.words, verb.run, verb.positional, verb.repeated, _epilog(verb)), end="")
        return 0
    check_recipes(verb, rest)
    rest, overrides = part_overrides(verb, rest)
    options = parse(verb, rest)
    if isinstance(options, str):
        print(f"tvr: {options}", file=sys.stderr)
        return 2
    function = verb.function()
    quieten()
    if overrides:
        options["overrides"] = overrides
    return function(**options)


def _epilog(verb: Verb) -> str | None:
    if not verb.sections:
        return None
    shown = " and ".join(f"--{section}.*" for section in verb.sections)
    return f"Options {shown} override those of the recipes, as for `tvr fit`."


def _interrupted(verb: Verb) -> int:
    print(f"tvr: {verb.words} was interrupted{f'; {verb.go_on}' if verb.go_on else ''}", file=sys.stderr)
    return 130


def _help_all(verb: str) -> int:
    """Print all options of one of Lightning's commands."""
    _cli_of(verb)(args=[verb, "--help"])  # raises SystemExit
    return 0


def _cli_of(verb: str) -> type[AuditedCLI]:
    """Return a command-line class for one of Lightning's commands, which skips the options of the others."""
    from tvr_lightning.audit.run import AuditedCLI

    class OneVerb(AuditedCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {verb: AuditedCLI.subcommands()[verb]}

    return OneVerb


def _lightning(verb: str, rest: list[str], from_command_line: bool) -> int:
    from tvr_lightning.progress import shown

    with shown(f"{verb}: loading"):
        command_line = _cli_of(verb)
    quieten()

    if verb == "fit" and "--estimate" in rest:
        from tvr_lightning.cli.estimate import estimate_fit

        return estimate_fit([word for word in rest if word != "--estimate"])
    # With None, Lightning reads sys.argv, which launchers of further processes repeat.
    command_line(args=None if from_command_line else [verb, *rest])
    return 0


def _hint(verb: Verb, rest: Sequence[str]) -> str | None:
    """Return a command that works without data or weights; None for commands that read the user's own videos."""
    from tvr_lightning.config.recipe_files import recipes_of

    return _fixture_command(rest, verb) if verb.run is None or recipes_of(rest) else None


def _guard(run: Callable[[], int], hint: Callable[[], str | None]) -> int:
    """Turn errors that a user can fix into a message and an exit status; other errors keep their traceback."""
    from tvr_lightning.errors import MissingAssetError, UserError

    try:
        return run()
    except MissingAssetError as error:
        print("\n\n".join(filter(None, [f"tvr: {error}", hint()])), file=sys.stderr)
        return error.exit_status
    except UserError as error:
        print(f"tvr: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # `main` distinguishes a closed stdout from a process that died
        raise
    except OSError as error:
        if is_verbose() or not error.filename:
            raise
        print(f"tvr: {error.filename}: {error.strerror} (-v shows the traceback)", file=sys.stderr)
        return UserError.exit_status


def _fixture_command(rest: Sequence[str], verb: Verb) -> str:
    from tvr_lightning.config.recipe_files import recipes_of

    recipe = next((name for name in recipes_of(rest) if _names_method(name)), "recipes/clip4clip.yaml")
    return (
        "To start without data or weights:\n"
        "  tvr data synth msrvtt --root fixture --videos 500 --seed 0\n"
        f"  tvr {verb.words} --config {recipe} --config recipes/fixture.yaml"
    )


def _names_method(recipe: str) -> bool:
    from tvr_lightning.config.recipe_files import RecipeError, read_recipe

    try:
        model = read_recipe(recipe).get("model")
    except RecipeError:
        return False
    return isinstance(model, dict) and "class_path" in model


if __name__ == "__main__":
    sys.exit(main())
