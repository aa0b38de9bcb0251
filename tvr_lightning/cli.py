"""The `tvr` command: Lightning's fit, validate, test and predict, and this project's own verbs beside them.

Every verb is one function with typed arguments, from which jsonargparse makes the command line.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from tvr_lightning.command_line.lightning_help import lightning_help
from tvr_lightning.command_line.verb_help import option_names, read_verb, verb_help
from tvr_lightning.command_line.verb_values import refused
from tvr_lightning.quiet import VERBOSE, is_verbose, quieten

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from tvr_lightning.audit.run import AuditedCLI


@dataclass(frozen=True)
class Verb:
    """One verb of the command line.

    Attributes:
        words: as typed, such as `data synth`.
        help: its line in the list of verbs.
        run: what it runs as "module:function"; signature and docstring make the options. None: one of Lightning's.
        positional: parameters given without `--name`; a list takes one or more words.
        repeated: options that may be given several times, besides `--config`.
        go_on: of verbs that take long, how to go on after an interruption.
        sections: of the recipe, whose options may be given besides, as for `tvr fit`; the function gets them as
            `overrides`.
    """

    words: str
    help: str
    run: str | None = None
    positional: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    go_on: str | None = None
    sections: tuple[str, ...] = ()

    def function(self) -> Callable[..., int]:
        """Return what the verb runs; imported only now, so that help is quick."""
        assert self.run is not None
        module, name = self.run.split(":")
        return getattr(importlib.import_module(module), name)


AGAIN = "the same command goes on where it stopped"
VERBS = (
    Verb(
        "fit",
        "train a recipe, test the result, print and write its table; --estimate tells before what it needs",
        go_on="with --checkpoints.resume=true the same command goes on from the last checkpoint",
    ),
    Verb("validate", "evaluate a checkpoint on the validation split"),
    Verb("test", "evaluate a checkpoint on the test split, print and write its table"),
    Verb("predict", "write the best videos of every test text to parquet"),
    Verb(
        "evaluate",
        "rank a similarity matrix from anywhere, print and write its table",
        "tvr_lightning.verbs.evaluate:evaluate_matrices",
        ("scores",),
        sections=("data",),
    ),
    Verb(
        "data synth",
        "write a synthetic dataset of real videos in a dataset's own layout",
        "tvr_lightning.verbs.data:data_synth",
        ("dataset",),
    ),
    Verb(
        "data get",
        "fetch a dataset that is kept openly on the hub",
        "tvr_lightning.verbs.data:data_get",
        ("dataset",),
        go_on=AGAIN,
    ),
    Verb(
        "data import",
        "bring a dataset as you hold it into the layout that is read",
        "tvr_lightning.verbs.data:data_import",
        ("dataset",),
        go_on=AGAIN,
    ),
    Verb(
        "data check", "list everything wrong with a dataset", "tvr_lightning.verbs.data:data_check", sections=("data",)
    ),
    Verb(
        "data compress",
        "copy a dataset's videos small, to train from",
        "tvr_lightning.verbs.data:data_compress",
        go_on=AGAIN,
        sections=("data",),
    ),
    Verb("data stats", "print what a dataset consists of", "tvr_lightning.verbs.data:data_stats", sections=("data",)),
    Verb("data show", "draw what a model sees and hears of a video", "tvr_lightning.verbs.data:data_show", ("video",)),
    Verb(
        "extract",
        "compute features once and store them",
        "tvr_lightning.verbs.extract:extract_features",
        ("videos",),
        go_on=AGAIN,
        sections=("model", "data"),
    ),
    Verb(
        "caption",
        "describe videos with a vision-language model",
        "tvr_lightning.verbs.extract:caption_videos",
        go_on=AGAIN,
        sections=("data",),
    ),
    Verb(
        "convert",
        "turn an authors' checkpoint into one that `tvr test` loads",
        "tvr_lightning.authors.convert:run_convert",
        ("source", "out"),
    ),
    Verb(
        "audit",
        "check that no ground truth leaks into the scores",
        "tvr_lightning.audit.run:run_audit",
        sections=("model", "data"),
    ),
    Verb("index", "make videos searchable", "tvr_lightning.verbs.search:run_index", ("videos",), ("ckpt", "trust")),
    Verb(
        "search",
        "find videos in an index by words or by an example",
        "tvr_lightning.verbs.search:run_search",
        ("query",),
        ("index", "video", "picture", "trust"),
    ),
    Verb(
        "serve",
        "serve a page and an API that search an index",
        "tvr_lightning.verbs.search:run_serve",
        repeated=("index", "videos", "trust"),
    ),
    Verb("published", "print what the papers publish", "tvr_lightning.reproduce.published_verb:run_published"),
    Verb(
        "reproduce",
        "run published tables again and set what comes out beside the print",
        "tvr_lightning.reproduce.reproduce_verb:run_reproduce",
        ("tables",),
        go_on=AGAIN,
    ),
    Verb(
        "report",
        "write what was reproduced as tables and one page with figures",
        "tvr_lightning.reproduce.report.report_verb:run_report",
        ("directory",),
    ),
    Verb(
        "verify-released",
        "measure the authors' released checkpoints beside the print",
        "tvr_lightning.reproduce.released:run_verify_released",
        ("checkpoints",),
    ),
    Verb(
        "profile",
        "measure what a method costs",
        "tvr_lightning.reproduce.profile.verb:run_profile",
        sections=("model", "data", "trainer"),
    ),
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the `tvr` command.

    Args:
        args: the words after `tvr`; None takes them from the command line.

    Returns:
        The exit status, 130 after an interruption from the keyboard. Bad options leave through SystemExit with status
        2, as argparse does.
    """
    words = list(sys.argv[1:] if args is None else args)
    if asked := {"-v", "--verbose"} & set(words):
        # Not an option of each verb: processes of further devices, which repeat the command line, inherit it.
        os.environ[VERBOSE] = "1"
        words = [word for word in words if word not in asked]
        if args is None:
            sys.argv[1:] = words
    verb = next((v for v in VERBS if words[: len(v.words.split())] == v.words.split()), None)
    if verb is None:
        return _help(words)
    rest = words[len(verb.words.split()) :]
    try:
        return _guard(lambda: _run(verb, rest, from_command_line=args is None), partial(_hint, verb, rest))
    except KeyboardInterrupt:
        return _interrupted(verb)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning's way to end
            return _interrupted(verb)
        raise


def _run(verb: Verb, rest: list[str], from_command_line: bool) -> int:
    if verb.run is None:
        if {"-h", "--help"} & set(rest):
            from tvr_lightning.recipe_files import RECIPES

            print(lightning_help(verb.words, verb.help, RECIPES))
            return 0
        if "--help-all" in rest:
            return _help_all(verb.words)
        _look_at_files(verb.words, rest)
        return _lightning(verb.words, rest, from_command_line)
    if {"-h", "--help"} & set(rest):
        print(verb_help(verb.words, verb.run, verb.positional, verb.repeated, _epilog(verb)), end="")
        return 0
    _look_at_files(verb.words, rest)
    rest, overrides = _overrides(verb, rest)
    options = _parse(verb, rest)
    if isinstance(options, str):
        print(f"tvr: {options}", file=sys.stderr)
        return 2
    function = verb.function()
    quieten()
    if overrides:
        options["overrides"] = overrides
    return function(**options)


def _look_at_files(verb: str, words: Sequence[str]) -> None:
    """Refuse recipes and checkpoints that are not there, before what reads them is loaded."""
    from tvr_lightning.recipe_files import EVALUATING, RecipeError, nothing_to_run, read_recipe, recipes_of

    for recipe in recipes_of(words):
        read_recipe(recipe)
    if verb not in ("fit", *EVALUATING):
        return
    if not words:
        raise nothing_to_run(verb)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        path = value if equals else following
        local = verb in EVALUATING and name == "--ckpt_path" and path != "null" and "://" not in path
        if local and not Path(path).exists():
            raise RecipeError(f"{path}: no such checkpoint; looked for it at {Path(path).absolute()}")


def _overrides(verb: Verb, words: list[str]) -> tuple[list[str], list[str]]:
    """Part the words after a verb into its own and those that change options of the recipes it is given."""
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


def _parse(verb: Verb, words: list[str]) -> dict[str, Any] | str:
    """Return the options of one of this project's own verbs by name, or a sentence on the first that is wrong."""
    assert verb.run is not None
    options = {option.replace("-", "_"): option for option in option_names(verb.run, verb.positional)}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        known = options.get(name.replace("-", "_"))  # `--num-workers` and `--num_workers` are the same
        if word.startswith("--") and known is not None:
            words[place] = f"{known}{equals}{value}"
        elif name.partition(".")[0].rstrip("+").replace("-", "_") in options:  # of the class that one names; one more
            continue
        elif word.startswith("--") and not any(option.startswith(name) for option in options.values()):
            near = difflib.get_close_matches(name, options.values(), n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            return f"{verb.words} has no option {name}; {meant}`tvr {verb.words} --help` lists all"
    said = refused(words, read_verb(verb.run).parameters, verb.positional)
    if said is not None:
        return f"{verb.words}: {said}"
    from jsonargparse import ArgumentError

    from tvr_lightning.progress import shown

    with shown(f"{verb.words}: loading"):
        parser = verb_parser(verb)
    try:
        return parser.instantiate(parser.parse_args(words)).as_dict()  # classes such as a normalisation's
    except ArgumentError as error:
        return f"{verb.words}: {_refusal(verb.run, str(error))}"


def _refusal(run: str, message: str) -> str:
    """Return what the parser says of a value in a line: what is expected, without the types that it tried."""
    from tvr_lightning.explain import refusals

    found = re.search(r'Parser key "(\w+)":', message)
    value = re.search(r"(?:Got|Given) value: (.*)\Z", message.strip())
    kinds = {parameter.name: parameter for parameter in read_verb(run).parameters}
    parameter = kinds.get(found[1]) if found else None
    if parameter is None or value is None:
        return " ".join(refusals(message).split())
    return f"{parameter.name.rstrip('_')} is {value[1]}; expected {parameter.expected}"


def _epilog(verb: Verb) -> str | None:
    if not verb.sections:
        return None
    shown = " and ".join(f"--{section}.*" for section in verb.sections)
    return f"{shown} change options of the recipes, as for `tvr fit`."


def _interrupted(verb: Verb) -> int:
    print(f"tvr: {verb.words} was interrupted{f'; {verb.go_on}' if verb.go_on else ''}", file=sys.stderr)
    return 130


def verb_parser(verb: Verb) -> ArgumentParser:
    """Return the parser of one of this project's own verbs, made from its function's signature and docstring."""
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
    # Repeated as for Lightning's verbs: `--config a.yaml --config b.yaml`.
    for name in [name for name in ("config", *verb.repeated) if name in hints]:
        required = parameters[name].default is inspect.Parameter.empty
        parser.add_argument(f"--{name}", type=str, action="append", required=required, help=helps.get(name))
        skip.add(name)
    for name, parameter in parameters.items():
        if hints[name] is bool and parameter.default is False:
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(option, dest=name, action="store_true", help=helps.get(name))
            skip.add(name)
    for name in [name for name in parameters if name.endswith("_")]:  # words that Python keeps for itself
        option = f"--{name.rstrip('_')}"
        parser.add_argument(option, dest=name, type=hints[name], required=True, help=helps.get(name))
        skip.add(name)
    parser.add_function_arguments(function, skip=skip, as_group=False)
    return parser


def _help_all(verb: str) -> int:
    """Print every option of one of Lightning's verbs."""
    _cli_of(verb)(args=[verb, "--help"])  # leaves through SystemExit
    return 0


def _cli_of(verb: str) -> type[AuditedCLI]:
    """Return the command line of one of Lightning's verbs, which builds no options of the others."""
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
        from tvr_lightning.verbs.estimate import estimate_fit

        return estimate_fit([word for word in rest if word != "--estimate"])
    # On the command line the arguments are left to sys.argv: launchers of further processes repeat it.
    command_line(args=None if from_command_line else [verb, *rest])
    return 0


def _hint(verb: Verb, rest: Sequence[str]) -> str | None:
    """Return a command that works without data or weights; None for whoever has videos or tables at hand."""
    from tvr_lightning.recipe_files import recipes_of

    return _fixture_command(rest, verb) if verb.run is None or recipes_of(rest) else None


def _guard(run: Callable[[], int], hint: Callable[[], str | None]) -> int:
    """Turn what a user can mend into a message and an exit status; anything else keeps its traceback."""
    from tvr_lightning.errors import MissingAssetError, UserError, refused_here

    try:
        return run()
    except MissingAssetError as error:
        print("\n\n".join(filter(None, [f"tvr: {error}", hint()])), file=sys.stderr)
        return error.exit_status
    except UserError as error:
        print(f"tvr: {error}", file=sys.stderr)
        return error.exit_status
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        file = error.filename if isinstance(error, OSError) else None
        if is_verbose() or not (file or refused_here(error)):
            raise
        said = f"{file}: {error.strerror}" if isinstance(error, OSError) and file else str(error)
        print(f"tvr: {' '.join(said.split())} (-v shows where)", file=sys.stderr)
        return UserError.exit_status


def _fixture_command(rest: Sequence[str], verb: Verb) -> str:
    from tvr_lightning.recipe_files import recipes_of

    recipe = next((name for name in recipes_of(rest) if _names_method(name)), "recipes/clip4clip.yaml")
    return (
        "This works right now, without data or weights:\n"
        "  tvr data synth msrvtt --root fixture --videos 500 --seed 0\n"
        f"  tvr {verb.words if verb.sections else 'fit'} --config {recipe} --config recipes/fixture.yaml"
    )


def _names_method(recipe: str) -> bool:
    from tvr_lightning.recipe_files import RecipeError, read_recipe

    try:
        model = read_recipe(recipe).get("model")
    except RecipeError:
        return False
    return isinstance(model, dict) and "class_path" in model


def _help(words: list[str]) -> int:
    """Print the list of verbs; an unknown verb is an error with status 2."""
    from tvr_lightning._version import __version__

    parser = argparse.ArgumentParser(
        prog="tvr",
        description="Text-video retrieval papers, reproduced with PyTorch Lightning.",
        epilog="Each verb has its own --help; fit, validate, test and predict take --config RECIPE, a file or the name "
        "of one of this project's, several on top of one another. -v shows everything that libraries say, too.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tvr VERB [options]",
    )
    parser.add_argument("--version", action="version", version=__version__)
    group = parser.add_argument_group("verbs")
    for verb in VERBS:
        group.add_argument(f"{verb.words}", help=verb.help, nargs="?", metavar=verb.words, default=None)
    if (
        not words
        or words[0] in ("-h", "--help")
        or words == ["data"]
        or words[:2] in (["data", "-h"], ["data", "--help"])
    ):
        parser.print_help()
        return 0
    if words[0].startswith("-"):
        parser.parse_args(words)
    asked = " ".join(words[:2] if words[0] == "data" else words[:1])
    near = difflib.get_close_matches(asked, [verb.words for verb in VERBS], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    print(f"tvr: there is no verb {asked}; {meant}`tvr --help` lists all", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
