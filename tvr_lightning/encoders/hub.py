"""Small files of repositories on the Hugging Face hub: configurations and tokenizers, not weights."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tvr_lightning.errors import MissingAssetError

PROBE_SECONDS = 5.0


class MissingWeightsError(MissingAssetError):
    """Weights or what belongs to them are neither on this machine nor to be had; says what, where, and what helps.

    Attributes:
        looked_for: the same without what helps, which is another option where there is no recipe.
    """

    def __init__(self, message: str, looked_for: str | None = None) -> None:
        super().__init__(message)
        self.looked_for = looked_for or message


def repository_folder(name: str, files: Sequence[str], any_of: Sequence[str]) -> Path:
    """Find the folder that holds files of a repository: a folder of that name, the hub's cache, or a download.

    Args:
        name: a folder on this machine, or a repository such as `google/mt5-base`.
        files: that are fetched where they are not here.
        any_of: of which one must be there.

    Raises:
        MissingWeightsError: they are neither here nor to be had; says where they were looked for.
    """
    folder = Path(name).expanduser()
    if _holds(folder, any_of):
        return folder
    if folder.is_dir():
        raise MissingWeightsError(f"{folder.absolute()} contains none of {', '.join(any_of)}")
    looked = [str(folder.absolute())]
    if name.count("/") <= 1 and not name.startswith((".", "/", "~")):
        looked.append(huggingface_hub.constants.HF_HUB_CACHE)
        fetch = partial(huggingface_hub.snapshot_download, name, allow_patterns=[*files])
        with suppress(LocalEntryNotFoundError):
            found = Path(fetch(local_files_only=True))
            if _holds(found, any_of):
                return found
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            address = f"{huggingface_hub.constants.ENDPOINT}/{name}"
            try:
                probe(address)
                return Path(fetch())
            except (OSError, HfHubHTTPError) as error:
                looked.append(f"{address} ({error})")
    raise MissingWeightsError(f"looked in {', '.join(looked)}")


def _holds(folder: Path, files: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in files)


def probe(address: str) -> None:
    """Ask for the head of the server's front page: an unreachable host must not cost minutes of retries.

    Raises:
        OSError: nobody answers.
    """
    parts = urlsplit(address)
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}/", method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()  # an answer, whatever it says
