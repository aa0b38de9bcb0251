"""Types of the options of commands that are checked before torch is imported: paths, and numbers in a range."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tvr_lightning.config.check import in_words
from tvr_lightning.option_types import Range


@dataclass(frozen=True)
class PathKind:
    """Required kind of a path.

    Attributes:
        kind: `file`, `folder`, or `file or folder` that must exist; `new file` or `new folder`, which may also exist.
        advice: Advice if the path does not exist; `{path}` is replaced by the path.
    """

    kind: Literal["file", "folder", "file or folder", "new file", "new folder"]
    advice: str = ""

    def problem(self, path: Path) -> str | None:
        """Return why a path is unusable, or None."""
        new, kind = self.kind.startswith("new "), self.kind.removeprefix("new ")
        if not new and not path.exists():
            return f"{path}: no such {kind}; {self.advice.format(path=path) or f'looked for it at {path.absolute()}'}"
        if path.exists() and kind == ("file" if path.is_dir() else "folder"):
            return f"{path} is a {'folder' if path.is_dir() else 'file'}; name a {kind}"
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if existing != path and not existing.is_dir():
            return f"{path} cannot be created, since {existing} is a file; choose another path"
        needed = (os.W_OK if new else os.R_OK) | (os.X_OK if existing.is_dir() else 0)
        if not os.access(existing, needed):
            return f"{path}: no permission to {'write' if new else 'read'} {existing}; choose another path"
        return None


File = Annotated[Path, PathKind("file")]
Folder = Annotated[Path, PathKind("folder")]
FileOrFolder = Annotated[Path, PathKind("file or folder")]
NewFile = Annotated[Path, PathKind("new file")]
NewFolder = Annotated[Path, PathKind("new folder")]
Index = Annotated[Path, PathKind("folder", "make one with tvr index VIDEOS... --out {path}")]
Runs = Annotated[Path, PathKind("folder", "create one with tvr reproduce TABLE --out {path}")]
AtLeast2 = Annotated[int, Range(at_least=2)]
AtLeast4 = Annotated[int, Range(at_least=4)]
AtLeast8 = Annotated[int, Range(at_least=8)]
AtLeast16 = Annotated[int, Range(at_least=16)]
AtLeast28 = Annotated[int, Range(at_least=28)]
Port = Annotated[int, Range(at_least=0, at_most=65535)]


def value_type(hint: Any) -> tuple[Any, Any]:
    """Return the type of one value of an option, without None and lists, and its `Range` or `PathKind` or None."""
    while get_origin(hint) in (list, Union, UnionType):
        hint = get_args(hint)[0]
    return get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)


def metavar(hint: Any) -> str:
    """Return the placeholder of a value in a help text, such as `N` or `{h264,jpeg}`."""
    kind, limit = value_type(hint)
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if kind is Path:
        return "PATH" if limit is None or " or " in limit.kind else limit.kind.split()[-1].upper()
    return {int: "N", float: "X"}.get(kind, "TEXT")


def expected(hint: Any) -> str:
    """Return a description of the valid values, such as `a whole number of at least 8`."""
    kind, limit = value_type(hint)
    if get_origin(kind) is Literal:
        return in_words(get_args(kind))
    name = {int: "a whole number", float: "a number", Path: "a path"}.get(kind, "text")
    return f"{name} of {limit.words}" if isinstance(limit, Range) else name


def convert(hint: Any, text: str) -> Any:
    """Return the value that the text of an option stands for.

    Raises:
        ArgumentTypeError: The value is not allowed; the message follows the name of the option.
    """
    kind, limit = value_type(hint)
    if kind is Path:
        problem = limit and limit.problem(Path(text))
        if problem:
            raise ArgumentTypeError(problem)
        return Path(text)
    if get_origin(kind) is Literal:
        valid, value = text in get_args(kind), text
    else:
        try:
            value = kind(text)
            valid = limit is None or limit.refusal(value) is None
        except ValueError:
            valid = False
    if not valid:
        raise ArgumentTypeError(f"is {text or 'empty'}; expected {expected(hint)}")
    return value
