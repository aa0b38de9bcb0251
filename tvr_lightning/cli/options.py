"""Types of the options of commands, which are checked before torch is imported, and options that commands share.

A command's function annotates each parameter with its type and its help, as in `Annotated[Count, "number of frames"]`.
A text before the help is the placeholder of a value, such as `FILE`.
"""

import os
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tvr_lightning.option_types import Count, Range


@dataclass(frozen=True)
class PathKind:
    """Required kind of a path, which must exist unless it is new, and the advice if `{path}` does not exist.

    With `remote`, an address such as `s3://bucket/prefix` is also allowed and is not checked.
    """

    kind: Literal["file", "folder", "file or folder", "new file", "new folder"]
    advice: str = "looked for it at {absolute}"
    remote: bool = False

    def read(self, text: str) -> Path | str:
        """Return the path that a text stands for, or raise an ArgumentTypeError if it is unusable."""
        if self.remote and "://" in text:
            return text
        path = Path(text)
        kind = self.kind.removeprefix("new ")
        new = kind != self.kind
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        is_folder = existing.is_dir()
        if existing != path and not new:
            advice = self.advice.format(path=path, absolute=path.absolute())
            raise ArgumentTypeError(f"{path}: no such {kind}; {advice}")
        if existing == path and kind == ("file" if is_folder else "folder"):
            raise ArgumentTypeError(f"{path} is a {'folder' if is_folder else 'file'}; name a {kind}")
        if existing != path and not is_folder:
            raise ArgumentTypeError(f"{path} cannot be created, since {existing} is a file; choose another path")
        if not os.access(existing, (os.W_OK if new else os.R_OK) | (os.X_OK if is_folder else 0)):
            action = "write" if new else "read"
            raise ArgumentTypeError(f"{path}: no permission to {action} {existing}; choose another path")
        return path


File = Annotated[Path, PathKind("file")]
Folder = Annotated[Path, PathKind("folder")]
FileOrFolder = Annotated[Path, PathKind("file or folder")]
Checkpoint = Annotated[Path | None, PathKind("file or folder")]
NewFile = Annotated[Path, PathKind("new file")]
NewFolder = Annotated[Path, PathKind("new folder")]
Index = Annotated[
    Path | str,
    PathKind("folder", "make one with tvr index VIDEOS... --out {path}", remote=True),
    "folder or address of the index",
]
NewIndex = Annotated[
    Path | str, PathKind("new folder", remote=True), "folder of the index, or an address such as s3://bucket/prefix"
]
Runs = Annotated[Path, PathKind("folder", "create one with tvr reproduce TABLE --out {path}")]
Port = Annotated[int, Range(at_least=0, at_most=65535)]
Config = Annotated[list[str], "RECIPE", "name or file of a recipe or overlay; later ones override earlier ones"]
Device = Annotated[str | None, "device for the models; a GPU by default if available"]
Processes = Annotated[Count, "number of processes"]
Trust = Annotated[list[str], "module or model repository, other than this package, whose code checkpoints may run"]
CORES = os.cpu_count() or 1


def chosen_device(name: str | None) -> str:
    """Return a device by name, or a GPU if available."""
    import torch

    return name or ("cuda" if torch.cuda.is_available() else "cpu")
