"""Types of the options of commands, which are checked before torch is imported, and options that commands share.

A command's function annotates each parameter with its type and its help, as in `Annotated[Count, "number of frames"]`.
"""

import os
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tvr_lightning.option_types import Count, Range, in_words


@dataclass(frozen=True)
class PathKind:
    """Required kind of a path, which must exist unless it is new, with the advice if the `{path}` does not exist."""

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
Index = Annotated[Path, PathKind("folder", "make one with tvr index VIDEOS... --out {path}"), "folder of the index"]
Runs = Annotated[Path, PathKind("folder", "create one with tvr reproduce TABLE --out {path}")]
Port = Annotated[int, Range(at_least=0, at_most=65535)]
Config = Annotated[list[str], "name or file of a recipe or overlay; later ones override earlier ones"]
Device = Annotated[str | None, "device for the models; a GPU by default if available"]
Processes = Annotated[Count, "number of processes"]
Trust = Annotated[list[str], "module or model repository, other than this package, whose code checkpoints may run"]
CORES = os.cpu_count() or 1


def chosen_device(name: str | None) -> str:
    """Return a device by name, or a GPU if available."""
    import torch

    return name or ("cuda" if torch.cuda.is_available() else "cpu")


class Option:
    """Type of one value, help, and limits of an option, from the annotation of a parameter, as argparse's `type`."""

    many = False

    def __init__(self, hint: Any) -> None:
        notes: list[Any] = []
        while get_origin(hint) in (Annotated, list, Union, UnionType):
            self.many = self.many or get_origin(hint) is list
            notes += getattr(hint, "__metadata__", ())
            hint = get_args(hint)[0]
        self.kind = hint
        self.choices = get_args(hint) if get_origin(hint) is Literal else ()
        self.help = next((note for note in reversed(notes) if isinstance(note, str)), "")
        self.limit: Range | PathKind | None = next((note for note in notes if not isinstance(note, str)), None)

    @property
    def metavar(self) -> str:
        """Placeholder of a value in a help text, such as `N` or `FILE`."""
        if isinstance(self.limit, PathKind):
            return "PATH" if " or " in self.limit.kind else self.limit.kind.split()[-1].upper()
        return "NAME" if self.choices else {int: "N", float: "X", Path: "PATH"}.get(self.kind, "TEXT")

    @property
    def expected(self) -> str:
        """Description of the valid values, such as `a whole number of at least 8`."""
        if self.choices:
            return in_words(self.choices)
        name = {int: "a whole number", float: "a number", Path: "a path"}.get(self.kind, "text")
        return f"{name} of {self.limit}" if isinstance(self.limit, Range) else name

    def __call__(self, text: str) -> Any:
        """Return the value that a text stands for."""
        if isinstance(self.limit, PathKind) and (problem := self.limit.problem(Path(text))):
            raise ArgumentTypeError(problem)
        try:
            value: Any = text if self.choices else self.kind(text)
            valid = value in (self.limit if isinstance(self.limit, Range) else self.choices or [value])
        except ValueError:
            valid = False
        if not valid:
            raise ArgumentTypeError(f"is {text or 'empty'}; expected {self.expected}")
        return value
