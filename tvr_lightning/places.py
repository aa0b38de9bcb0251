"""Requirements for the paths in a command's arguments, written in their types and checked before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal


@dataclass(frozen=True)
class Place:
    """Requirement for a path.

    Attributes:
        kind: Existing `file`, `folder`, or `either` of them; a `new-file` or `new-folder` may also exist.
        advice: Advice if the path does not exist; `{path}` is replaced by the path.
    """

    kind: Literal["file", "folder", "either", "new-file", "new-folder"]
    advice: str = ""

    def refusal(self, given: str | Path) -> str | None:
        """Return the reason why a path is not suitable, or None if it is."""
        path = Path(given)
        try:
            return self._of_new(path) if self.kind.startswith("new-") else self._of_present(path)
        except OSError as error:  # such as a name that is too long
            return f"{path}: {error.strerror}; give another path"

    def _of_present(self, path: Path) -> str | None:
        if not path.exists():
            what = "file or folder" if self.kind == "either" else self.kind
            looked = f"looked for it at {path.absolute()}" if not path.is_absolute() else "check the path"
            return f"{path}: no such {what}; {self.advice.format(path=path) or looked}"
        if self.kind == "file" and path.is_dir():
            return f"{path} is a folder; name a file"
        if self.kind == "folder" and not path.is_dir():
            return f"{path} is a file; name a folder"
        if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            return f"{path} cannot be read; change its permissions"
        return None

    def _of_new(self, path: Path) -> str | None:
        if self.kind == "new-file" and path.is_dir():
            return f"{path} is a folder; name a file in it"
        if self.kind == "new-folder" and path.exists() and not path.is_dir():
            return f"{path} is a file; name a folder"
        over = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if over != path and not over.is_dir():
            return f"{path} cannot be created, since {over} is a file; choose another path"
        if not os.access(over, os.W_OK | (os.X_OK if over.is_dir() else 0)):
            where = "it" if over == path else over
            return f"{path} cannot be written, since {where} is read-only; choose another path"
        return None


File = Annotated[Path, Place("file")]
Folder = Annotated[Path, Place("folder")]
NewFile = Annotated[Path, Place("new-file")]
NewFolder = Annotated[Path, Place("new-folder")]
