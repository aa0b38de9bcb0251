"""Recipe files: named on a command line, found by path or by the name of a packaged one, and read as plain values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tvr_lightning.errors import UserError

_PACKAGED = Path(__file__).parent / "recipes"
RECIPES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[1] / "recipes"
"""This project's recipes: within the package as installed, beside it in a checkout."""


class RecipeError(UserError, ValueError):
    """A recipe's options are out of range, conflict, or ask for what the data does not have."""


class OptionError(RecipeError):
    """A class or an option does not exist, or a value is of another type; names what there is, nearest first."""

    exit_status = 2  # as argparse ends


def refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Refuse options that were given but do not apply; None and False are the values of those that were not.

    Args:
        options: Values by name.
        reason: Rest of the sentence that begins with the names.

    Raises:
        OptionError: One was given.
    """
    given = [f"--{name}" for name, value in options.items() if value is not None and value is not False]
    if given:
        raise OptionError(f"{', '.join(given)} {reason}")


CHECKPOINTS = ("null", "best", "last", "hpc", "registry")
"""Values of --ckpt_path that are not files; Lightning finds the checkpoints."""
EVALUATING = ("validate", "test", "predict")


def nothing_to_run(verb: str) -> OptionError:
    """Return what to say of a verb that is given no recipe."""
    or_checkpoint = "a checkpoint (--ckpt_path FILE) or " if verb in EVALUATING else ""
    return OptionError(
        f"{verb} needs {or_checkpoint}a recipe, such as tvr {verb} --config tcmgc. `tvr {verb} --help` lists recipes."
    )


def find_recipe(name: str | Path, option: str = "--config") -> Path:
    """Return the recipe of that name: a file of the user's, else one of this project's.

    Args:
        name: path of a file, or of this project's recipes `recipes/data/didemo.yaml`, or `data/didemo` for short.
        option: that names it, for the error.

    Raises:
        RecipeError: there is none; names the nearest.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("recipes",) else path
    own = RECIPES / inside.with_name(f"{inside.name.removesuffix('.yaml')}.yaml") if inside.name else RECIPES
    if own.is_file():
        return own
    reason = "is a folder" if path.is_dir() else "no such file"
    raise RecipeError(f"{option} {name}: {reason}; {_near(path)}")


def recipes_folder(folder: Path) -> Path:
    """Return a folder of recipes and tables: the user's where it has tables, else, for `recipes`, this project's."""
    return RECIPES if folder == Path("recipes") and not (folder / "tables").is_dir() else folder


def read_recipe(name: str | Path) -> dict[str, Any]:
    """Return a recipe's values, empty for an empty file; values alone are read, tags that would run code are refused.

    Args:
        name: as `find_recipe` takes it.

    Raises:
        RecipeError: there is no such file, or it is no YAML mapping of plain values; says which file, and for an absent
            one which recipe is near.
    """
    try:
        content = yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"--config {name}: {error.strerror}; {_near(Path(name))}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        said = getattr(error, "problem", None) or " ".join(str(error).split())
        raise RecipeError(f"--config {name}{where}: not a recipe (YAML with plain values): {said}") from error
    if not isinstance(content, dict | None):
        raise RecipeError(f"--config {name} is not a recipe: it contains a {type(content).__name__}, not named options")
    return content or {}


def _near(path: Path) -> str:
    """Return which recipe is meant, or which there are in the folder of `path`, or where recipes were looked for."""
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("recipes",) else path
    own = RECIPES / inside.parent
    folders = [path.parent, own] if inside.parent != Path() else [Path(), Path("recipes"), RECIPES, *RECIPES.glob("*/")]
    there: dict[str, str] = {}  # the shortest name of every recipe; this project's own are found by theirs anywhere
    for folder in dict.fromkeys(folders):
        for found in sorted(folder.glob("*.yaml")):
            shown = f"recipes/{found.relative_to(RECIPES).as_posix()}" if found.is_relative_to(RECIPES) else str(found)
            there[found.stem] = min(there.get(found.stem, shown), shown, key=len)
    names = difflib.get_close_matches(path.name.removesuffix(".yaml").removesuffix(".yml"), there, n=1, cutoff=0.6)
    if names:
        return f"did you mean {there[names[0]]}?"
    if own.is_dir() and own != RECIPES and own.is_relative_to(RECIPES):
        return f"available in recipes/{own.relative_to(RECIPES)}: {', '.join(sorted(there))}"
    return f"looked for it at {path.absolute()} and in {RECIPES}"


def with_recipes_found(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the files that its recipes are in the place of their names.

    Args:
        arguments: as typed.

    Raises:
        RecipeError: a recipe is not there, or is none.
    """
    found = list(arguments)
    for place, word, recipe in _named(arguments):
        if recipe and not is_written_out(recipe):
            read_recipe(recipe)  # says what is wrong with it before the parser does
            path = str(find_recipe(recipe))
            if word == recipe:
                found[place] = path
            else:
                found[place] = f"{word.partition('=')[0]}={path}"
    return found


def recipes_first(arguments: Sequence[str]) -> list[str]:
    """Return a command line with its recipes before its options, which override them wherever they stand.

    Args:
        arguments: as typed, with the command first or without it.
    """
    recipes: list[str] = []
    others = list(arguments)
    for place, word, recipe in reversed(list(_named(arguments))):
        behind = word == recipe  # the value of a word before it
        recipes[:0] = arguments[place - behind : place + 1]
        del others[place - behind : place + 1]
    command = others[:1] if others and not others[0].startswith("-") else []
    return [*command, *recipes, *others[len(command) :]]


def recipes_of(arguments: Sequence[str]) -> list[str]:
    """Return the recipe files that a command line names; recipes written out in the place of a file are none."""
    return [recipe for _, _, recipe in _named(arguments) if recipe and not is_written_out(recipe)]


def is_written_out(recipe: str) -> bool:
    """Whether a recipe is no file's name but the recipe itself."""
    return re.search(r"[{\n]|: ", recipe) is not None


def config_of(word: str, following: str) -> str | None:
    """Return the recipe that a word of a command line names, a file or one written out; None where it names none.

    Args:
        word: of the command line.
        following: the word behind it.
    """
    if word in ("--config", "-c"):
        return following
    return word.partition("=")[2] if word.startswith(("--config=", "-c=")) else None


def _named(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield where a command line names recipes: the place of the word, the word, and the recipe in it."""
    for place, word in enumerate(arguments):
        recipe = config_of(word, arguments[place + 1] if place + 1 < len(arguments) else "")
        if recipe is not None:
            behind = word in ("--config", "-c")
            yield place + behind, recipe if behind else word, recipe
