"""Types of the options of commands: numbers in a range and paths, which the parser checks before torch is imported."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from jsonargparse import typing
from jsonargparse.typing import extend_base_type, restricted_number_type

BOUNDS = {operator.gt: "above", operator.ge: "at least", operator.lt: "below", operator.le: "at most"}

if TYPE_CHECKING:  # checkers of types see the built-in ones
    PositiveInt = int
    NonNegativeInt = int
    AtLeast2 = int
    AtLeast4 = int
    AtLeast8 = int
    AtLeast16 = int
    AtLeast28 = int
    Port = int
    NonNegativeFloat = float
    UnitInterval = float
    File = Path
    Folder = Path
    FileOrFolder = Path
    NewFile = Path
    NewFolder = Path
    Index = Path
    Runs = Path
else:
    PositiveInt, NonNegativeInt = typing.PositiveInt, typing.NonNegativeInt
    NonNegativeFloat, UnitInterval = typing.NonNegativeFloat, typing.ClosedUnitInterval
    AtLeast2 = restricted_number_type("AtLeast2", int, (">=", 2))
    AtLeast4 = restricted_number_type("AtLeast4", int, (">=", 4))
    AtLeast8 = restricted_number_type("AtLeast8", int, (">=", 8))
    AtLeast16 = restricted_number_type("AtLeast16", int, (">=", 16))
    AtLeast28 = restricted_number_type("AtLeast28", int, (">=", 28))
    Port = restricted_number_type("Port", int, [(">=", 0), ("<=", 65535)])


class _OptionPath(type(Path())):  # type: ignore[misc]
    """Path that can be copied although the constructor of a type of jsonargparse takes one argument."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (str(self),)


def path_type(name: str, kind: str, advice: str = "") -> Any:
    """Return the type of a path.

    Args:
        name: Name of the type.
        kind: `file`, `folder`, or `file or folder` that must exist; `new file` or `new folder`, which may also exist.
        advice: Advice if the path does not exist; `{path}` is replaced by the path.
    """

    def check(cls: type, value: str | Path) -> None:
        path = Path(value)
        try:
            problem = _problem_of_new(path, kind) if kind.startswith("new ") else _problem(path, kind, advice)
        except OSError as error:  # such as a name that is too long
            problem = f"{path}: {error.strerror}; give another path"
        if problem:
            raise ValueError(problem)

    return extend_base_type(name, _OptionPath, check, extra_attrs={"kind": kind})


def _problem(path: Path, kind: str, advice: str) -> str | None:
    if not path.exists():
        looked = f"looked for it at {path.absolute()}" if not path.is_absolute() else "check the path"
        return f"{path}: no such {kind}; {advice.format(path=path) or looked}"
    if kind == "file" and path.is_dir():
        return f"{path} is a folder; name a file"
    if kind == "folder" and not path.is_dir():
        return f"{path} is a file; name a folder"
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        return f"{path} cannot be read; change its permissions"
    return None


def _problem_of_new(path: Path, kind: str) -> str | None:
    if kind == "new file" and path.is_dir():
        return f"{path} is a folder; name a file in it"
    if kind == "new folder" and path.exists() and not path.is_dir():
        return f"{path} is a file; name a folder"
    over = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if over != path and not over.is_dir():
        return f"{path} cannot be created, since {over} is a file; choose another path"
    if not os.access(over, os.W_OK | (os.X_OK if over.is_dir() else 0)):
        where = "it" if over == path else over
        return f"{path} cannot be written, since {where} is read-only; choose another path"
    return None


if not TYPE_CHECKING:
    File = path_type("File", "file")
    Folder = path_type("Folder", "folder")
    FileOrFolder = path_type("FileOrFolder", "file or folder")
    NewFile = path_type("NewFile", "new file")
    NewFolder = path_type("NewFolder", "new folder")
    Index = path_type("Index", "folder", "make one with tvr index VIDEOS... --out {path}")
    Runs = path_type("Runs", "folder", "create one with tvr reproduce TABLE --out {path}")


def item_of(hint: Any) -> Any:
    """Return the type of one value of an option, without None and lists."""
    while get_origin(hint) is not Literal and get_args(hint):
        hint = get_args(hint)[0]
    return hint


def is_list(hint: Any) -> bool:
    """Return whether an option takes several values."""
    return get_origin(hint) is list or any(get_origin(inner) is list for inner in get_args(hint))


def metavar(hint: Any) -> str:
    """Return the placeholder of a value in a help text, such as `N` or `{h264,jpeg}`."""
    item = item_of(hint)
    if get_origin(item) is Literal:
        return "{" + ",".join(get_args(item)) + "}"
    if issubclass(item, Path):
        return item.kind.rpartition(" ")[2].upper() if hasattr(item, "kind") and "or" not in item.kind else "PATH"
    return "N" if issubclass(item, int) else "X" if issubclass(item, float) else "TEXT"


def expected(hint: Any) -> str:
    """Return a description of the valid values, such as `a whole number of at least 8`."""
    item = item_of(hint)
    if get_origin(item) is Literal:
        *others, last = get_args(item)
        return f"{', '.join(others)} or {last}" if others else last
    if item is PositiveInt:
        return "a positive integer"
    number = "a whole number" if issubclass(item, int) else "a number" if issubclass(item, float) else "text"
    limits = " and ".join(f"{BOUNDS[compare]} {bound}" for compare, bound in getattr(item, "_restrictions", ()))
    return f"{number} of {limits}" if limits.startswith("at") else f"{number} {limits}".rstrip()


def plain(value: Any) -> Any:
    """Return a value of an option as the built-in type, which can be pickled and written as JSON."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    kinds: tuple[type, ...] = (Path, int, float)
    kind = next((kind for kind in kinds if isinstance(value, kind) and not isinstance(value, bool)), None)
    return value if kind is None else kind(value)
