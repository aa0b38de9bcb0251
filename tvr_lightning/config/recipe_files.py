"""Recipe files: search by path or by the name of a packaged recipe, and reading as plain values."""

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tvr_lightning.errors import UserError

_PACKAGED = Path(__file__).parents[1] / "recipes"
RECIPES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "recipes"
"""This project's recipes: inside the package if installed, next to it in a checkout."""


def refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Raise UserError if an option was given (not None or False); `reason` completes the sentence after the names."""
    given = [f"--{name}" for name, value in options.items() if value is not None and value is not False]
    if given:
        raise UserError(f"{', '.join(given)} {reason}")


def find_recipe(name: str | Path, option: str = "--config") -> Path:
    """Return the path of a recipe: a file of the user, or else one of this project's recipes.

    `recipes/data/didemo.yaml` is `data/didemo` for short. The error for a missing recipe names the option.
    """
    if not str(name):
        raise UserError(f"{option} is empty. Name a recipe, such as tcmgc.")
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("recipes",) else path
    own = RECIPES / inside.with_name(f"{inside.name.removesuffix('.yaml')}.yaml") if inside.name else RECIPES
    if own.is_file():
        return own
    packaged = [file.relative_to(RECIPES).with_suffix("") for file in RECIPES.rglob("*.yaml")]
    nearest_first = [*path.parent.glob("*.yaml"), *sorted(packaged, key=lambda file: (len(file.parts), file))]
    there = {file.stem: file for file in reversed(nearest_first)}
    near = difflib.get_close_matches(path.name.removesuffix(".yaml").removesuffix(".yml"), there, n=1)
    hint = f"did you mean {there[near[0]]}?" if near else f"looked for it at {path.absolute()} and in {RECIPES}"
    raise UserError(f"{option} {name}: {'is a folder' if path.is_dir() else 'no such file'}; {hint}")


def recipes_folder(folder: Path) -> Path:
    """Return a folder of recipes and tables: the user's if it has tables, otherwise (for `recipes`) this project's."""
    return RECIPES if folder == Path("recipes") and not (folder / "tables").is_dir() else folder


def read_recipe(name: str | Path) -> dict[str, Any]:
    """Return the plain values of a recipe, given as for `find_recipe` or as inline YAML; refuse tags that run code."""
    import yaml

    try:
        text = str(name) if is_written_out(name) else find_recipe(name).read_text(encoding="utf-8")
        content = read_yaml(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"--config {name}: not a recipe (YAML with plain values): {said}") from error
    if not isinstance(content, dict):
        contains = "is empty" if content is None else f"contains a {type(content).__name__}, not named options"
        raise UserError(f"--config {name} is not a recipe: it {contains}")
    return content


def read_yaml(text: str) -> Any:
    """Return the plain values of YAML, in which 1e-4 is a number."""
    import yaml

    try:
        return yaml.load(text, _loader())
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


def read_value(text: str) -> Any:
    """Return the value of an option on a command line: YAML, or else the text itself, such as `@home/[2026] videos`."""
    import yaml

    try:
        return read_yaml(text)
    except (yaml.YAMLError, ValueError):  # ValueError: not a date, such as 2026-13-01
        return text


@cache
def _loader() -> Any:
    import yaml

    # The parser in C would overflow the stack, and so end the process, in a file that is nested deeply.
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return loader


def split_options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names and values of options, given as `--option=value`, `--option value`, or `--print_config`."""
    found = []
    rest = iter(arguments)
    for word in rest:
        option, equals, value = word.removeprefix("--").partition("=")
        found.append((option, value if equals or option == "print_config" else next(rest, "")))
    return found


def nested(option: str, value: Any) -> dict[str, Any]:
    """Return an option as a recipe contains it: `a.b` as `{a: {b: value}}`."""
    key, _, rest = option.partition(".")
    return {key: nested(rest, value) if rest else value}


def merged(under: Any, over: Any) -> Any:
    """Return nested values on top of others, whose classes are the same."""
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{key: merged(under.get(key), value) for key, value in over.items()}}


def is_written_out(recipe: str | Path) -> bool:
    """Return whether a recipe is inline YAML instead of a file name."""
    return re.search(r"[{\n]|: ", str(recipe)) is not None
