"""Output of `tvr` without a command."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from tvr_lightning._version import __version__
from tvr_lightning.cli.verbs import VERBS


def list_verbs(words: Sequence[str]) -> int:
    """Print the list of commands, or that a command does not exist.

    Args:
        words: Arguments that do not begin with a command.

    Returns:
        Exit status, 2 for an unknown command.
    """
    parser = argparse.ArgumentParser(
        prog="tvr",
        description="Text-video retrieval papers, reproduced with PyTorch Lightning.",
        epilog="Each command has its own --help. fit, validate, test, and predict take --config RECIPE: a file, or the "
        "name of one of this project's recipes. Repeat --config to combine recipes; later ones override earlier ones. "
        "-v also shows tracebacks and the messages of other libraries.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tvr COMMAND [options]",
    )
    parser.add_argument("--version", action="version", version=__version__)
    group = parser.add_argument_group("commands")
    for verb in VERBS:
        group.add_argument(f"{verb.words}", help=verb.help, nargs="?", metavar=verb.words, default=None)
    if (
        not words
        or words[0] in ("-h", "--help")
        or list(words) == ["data"]
        or list(words[:2]) in (["data", "-h"], ["data", "--help"])
    ):
        parser.print_help()
        return 0
    if words[0].startswith("-"):
        parser.parse_args(words)
    asked = " ".join(words[:2] if words[0] == "data" else words[:1])
    near = difflib.get_close_matches(asked, [verb.words for verb in VERBS], n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    print(f"tvr: {asked} is not a command. {meant}`tvr --help` lists all commands.", file=sys.stderr)
    return 2
