"""Places outside an index that its user named: videos, another machine's vector store, a captions file.

An index may come from anybody, so what it says of places proves nothing. `tvr index` remembers what the user typed in
the user's state directory, under the index's identity; `tvr serve` hands out files, and queries are sent to a host,
only where they were named: then, or on the command line now.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from tvr_lightning.files import user_state
from tvr_lightning.media.decoder import open_video
from tvr_lightning.media.opening import VideoError
from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.files import inside


@dataclass
class AllowedRoots:
    """What this user named for one index on this machine.

    Attributes:
        videos: files and folders, absolute and without symbolic links.
        store: address of the vector store, None where it lies in the index.
        captions: captions file, absolute; None without one.
    """

    videos: list[str] = field(default_factory=list)
    store: str | None = None
    captions: str | None = None

    @property
    def roots(self) -> list[Path]:
        """The videos as paths."""
        return [Path(path) for path in self.videos]


def identify(catalog: Catalog) -> None:
    """Give an index an identity, unless it has one: 32 hexadecimal digits that nobody guesses."""
    if not _identity(catalog):
        catalog.set_fact("identity", secrets.token_hex(16))


def remembered(catalog: Catalog) -> AllowedRoots:
    """Return what this user named for an index; nothing for one that came from elsewhere.

    Raises:
        SearchError: what is kept of it is damaged.
    """
    path = _file(catalog)
    if path is None:
        return AllowedRoots()
    try:
        return AllowedRoots(**json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        return AllowedRoots()
    except (ValueError, TypeError) as error:
        raise SearchError(
            f"{path} is damaged ({error}). Delete it and name the videos again with tvr index."
        ) from error


def remember(catalog: Catalog, places: AllowedRoots) -> str | None:
    """Keep what the user named for an index; one file, replaced at once.

    Returns:
        None, or why it cannot be kept, as "path: reason".
    """
    path = _file(catalog)
    if path is None:
        return "There is no home directory, so the named folders are not remembered. tvr serve will need --videos."
    draft = path.with_name(f"{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.write_text(json.dumps(asdict(places), indent=1), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        return f"{path}: {reason}. The named folders are not remembered, so tvr serve will need --videos."
    return None


def forget(catalog: Catalog) -> None:
    """Forget what the user named for an index that is given up."""
    path = _file(catalog)
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def choose_store(catalog: Catalog, given: str | None) -> str:
    """Return the vector store of an index, one on another machine only where the user named it."""
    address = given or catalog.fact("store") or "lancedb"
    if given is None and "://" in address and remembered(catalog).store != address:
        raise SearchError(
            f"{catalog.folder}: its vectors are stored at {address}, which would receive every query, and you did not "
            f"create this index here. If you trust that address, add --store {address}"
        )
    return str(address)


def known_roots(catalog: Catalog, places: AllowedRoots) -> list[Path]:
    """Return the files and folders that an index covers, if the user named all of them.

    Raises:
        SearchError: the index names others.
    """
    strange = [root for root in catalog.fact("roots") or [] if root not in places.videos]
    if strange:
        raise SearchError(
            f"{catalog.folder} lists {', '.join(strange)}, which you have not named here. To index them, run tvr index "
            f"{shlex.join([*strange, '--out', str(catalog.folder)])}"
        )
    return places.roots


def handed_out(path: Path, folders: Sequence[Path]) -> Path:
    """Return a file, all its symbolic links followed, that may be handed out.

    Args:
        path: the file as an index names it.
        folders: files and folders that the user named, resolved.

    Raises:
        SearchError: it lies below none of them, or is no video.
    """
    resolved = Path(os.path.realpath(path))
    if not inside(resolved, folders):
        raise SearchError(f"{path.name} is not in a folder that may be served. See tvr serve --videos.")
    try:
        state = resolved.stat()
        _require_video(resolved, state.st_size, state.st_mtime_ns)
    except VideoError as error:
        raise SearchError(f"{path.name}: {error.reason}") from error
    except OSError as error:
        raise SearchError(f"{path.name} cannot be read. Run tvr index again.") from error
    return resolved


@lru_cache(maxsize=4096)
def _require_video(path: Path, size: int, modified: int) -> None:
    """Check that a file is a video, once for each state of it: players ask for a file in many ranges of bytes."""
    with open_video(path, threads=1):
        return


def _identity(catalog: Catalog) -> str | None:
    identity = str(catalog.fact("identity"))
    return identity if re.fullmatch(r"[0-9a-f]{32}", identity) else None


def _file(catalog: Catalog) -> Path | None:
    identity, folder = _identity(catalog), user_state()
    return folder / "indexes" / f"{identity}.json" if identity and folder else None
