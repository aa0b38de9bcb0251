"""Recipe files: search by path or by the name of a packaged recipe, and reading as plain values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tvr_lightning.errors import UserError

_PACKAGED = Path(__file__).parents[1] / "recipes"
RECIPES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "recipes"
"""This project's recipes: inside the package if installed, next to it in a checkout."""


class RecipeError(UserError):
    """Options of a recipe are out of range, conflict, or need something that the data does not have."""


class OptionError(RecipeError):
    """A class or an option does not exist, or a value has the wrong type; the message lists choices, closest first."""

    exit_status = 2  # same as argparse


def refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Refuse given options that do not apply; None and False mean that an option was not given.

    Raises:
        OptionError: An option was given; `reason` completes the sentence after the names.
    """
    given = [f"--{name}" for name, value in options.items() if value is not None and value is not False]
    if given:
        raise OptionError(f"{', '.join(given)} {reason}")


CHECKPOINTS = ("null", "best", "last", "hpc", "registry")
"""Values of --ckpt_path that are not files; Lightning finds the checkpoints."""
EVALUATING = ("validate", "test", "predict")


def nothing_to_run(verb: str) -> OptionError:
    """Return the error for a command without a recipe."""
    or_checkpoint = "a checkpoint (--ckpt_path FILE) or " if verb in EVALUATING else ""
    return OptionError(
        f"{verb} needs {or_checkpoint}a recipe, such as tvr {verb} --config tcmgc. `tvr {verb} --help` lists recipes."
    )


def find_recipe(name: str | Path, option: str = "--config") -> Path:
    """Return the path of a recipe: a file of the user, or else one of this project's recipes.

    Args:
        name: Path of a file, or of this project's recipes as `recipes/data/didemo.yaml`, or `data/didemo` for short.
        option: Option that contains the name, for the error.

    Raises:
        RecipeError: The recipe does not exist; the message contains the closest name.
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
    """Return a folder of recipes and tables: the user's if it has tables, otherwise (for `recipes`) this project's."""
    return RECIPES if folder == Path("recipes") and not (folder / "tables").is_dir() else folder


def read_recipe(name: str | Path) -> dict[str, Any]:
    """Return a recipe's plain values, empty for an empty file; tags that would run code are refused.

    Args:
        name: Name or path, as for `find_recipe`.

    Raises:
        RecipeError: The file does not exist or is not a YAML mapping of plain values; the message names the file and,
            if it does not exist, the closest recipe.
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
    """Return a hint: the closest recipe, the recipes in the folder of `path`, or the searched folders."""
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("recipes",) else path
    own = RECIPES / inside.parent
    of_folder = own.is_dir() and own != RECIPES and own.is_relative_to(RECIPES)
    folders = [path.parent, own] if of_folder else [path.parent, Path("recipes"), RECIPES, *RECIPES.glob("*/")]
    there: dict[str, str] = {}  # shortest name of each recipe; this project's recipes are found by name from any folder
    for folder in dict.fromkeys(folders):
        for found in sorted(folder.glob("*.yaml")):
            shown = f"recipes/{found.relative_to(RECIPES).as_posix()}" if found.is_relative_to(RECIPES) else str(found)
            there[found.stem] = min(there.get(found.stem, shown), shown, key=len)
    names = difflib.get_close_matches(path.name.removesuffix(".yaml").removesuffix(".yml"), there, n=1, cutoff=0.6)
    if names:
        return f"did you mean {there[names[0]]}?"
    if of_folder:
        return f"available in recipes/{own.relative_to(RECIPES)}: {', '.join(sorted(there))}"
    return f"looked for it at {path.absolute()} and in {RECIPES}"


def with_recipes_found(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which the paths of recipes replace their names.

    Args:
        arguments: Arguments of the command line.

    Raises:
        RecipeError: A recipe does not exist or is invalid.
    """
    found = list(arguments)
    for place, word, recipe in _named(arguments):
        if recipe and not is_written_out(recipe):
            read_recipe(recipe)  # raises a clearer error than the parser
            path = str(find_recipe(recipe))
            if word == recipe:
                found[place] = path
            else:
                found[place] = f"{word.partition('=')[0]}={path}"
    return found


def recipes_first(arguments: Sequence[str]) -> list[str]:
    """Return a command line with recipes before options, so that options override recipes in any order.

    Args:
        arguments: Arguments of the command line, with or without the command.
    """
    recipes: list[str] = []
    others = list(arguments)
    for place, word, recipe in reversed(list(_named(arguments))):
        behind = word == recipe  # the value of the previous argument
        recipes[:0] = arguments[place - behind : place + 1]
        del others[place - behind : place + 1]
    command = others[:1] if others and not others[0].startswith("-") else []
    return [*command, *recipes, *others[len(command) :]]


def recipes_of(arguments: Sequence[str]) -> list[str]:
    """Return the recipe files on a command line, without inline recipes."""
    return [recipe for _, _, recipe in _named(arguments) if recipe and not is_written_out(recipe)]


def is_written_out(recipe: str) -> bool:
    """Return whether a recipe is inline YAML instead of a file name."""
    return re.search(r"[{\n]|: ", recipe) is not None


def config_of(word: str, following: str) -> str | None:
    """Return the recipe in an argument or the following one, a file or inline YAML, or None if there is none."""
    if word in ("--config", "-c"):
        return following
    return word.partition("=")[2] if word.startswith(("--config=", "-c=")) else None


def _named(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the recipes on a command line: index of the argument, argument, and recipe."""
    for place, word in enumerate(arguments):
        recipe = config_of(word, arguments[place + 1] if place + 1 < len(arguments) else "")
        if recipe is not None:
            behind = word in ("--config", "-c")
            yield place + behind, recipe if behind else word, recipe
