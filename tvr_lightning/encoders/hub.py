"""Files from repositories on the Hugging Face Hub."""

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
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of weights as transformers saves them."""


class MissingWeightsError(MissingAssetError):
    """Weights or their files are missing and cannot be downloaded; `looked_for` names the files and the paths.

    The message ends with a fix, which differs if there is no recipe.
    """

    def __init__(self, looked_for: str, fix: str = "") -> None:
        super().__init__(f"{looked_for}. {fix}" if fix else looked_for)
        self.looked_for = looked_for


def repository_folder(name: str, any_of: Sequence[str], missing: str, fix: str, files: Sequence[str] = ()) -> Path:
    """Return the folder with the files of a repository: a local folder, the Hub's cache, or a download.

    Args:
        name: Local folder, or repository such as `google/mt5-base`.
        any_of: Files of which at least one must exist.
        missing: First words of the error, such as "the tokenizer is missing".
        fix: Last sentence of the error.
        files: Files to download if they are missing; without any, nothing is downloaded.
    """

    def complete(folder: Path) -> bool:
        return any((folder / file).is_file() for file in any_of)

    folder = Path(name).expanduser()
    if folder.is_dir():
        if complete(folder):
            return folder
        raise MissingWeightsError(f"{missing}: {folder.absolute()} contains none of {', '.join(any_of)}. {fix}")
    looked = [str(folder.absolute())]
    if is_repository(name):
        looked.append(huggingface_hub.constants.HF_HUB_CACHE)
        fetch = partial(huggingface_hub.snapshot_download, name, allow_patterns=[*files])
        with suppress(LocalEntryNotFoundError):
            cached = Path(fetch(local_files_only=True))
            if complete(cached):
                return cached
        if files and not huggingface_hub.constants.HF_HUB_OFFLINE:
            address = f"{huggingface_hub.constants.ENDPOINT}/{name}"
            try:
                probe(address)
                return Path(fetch())
            except (OSError, HfHubHTTPError) as error:
                looked.append(f"{address} ({error})")
    raise MissingWeightsError(f"{missing}: looked in {', '.join(looked)}. {fix}")


def how_to_download(repository: str) -> str:
    """Return the advice for files of a repository that a machine without network access cannot download."""
    return f"Fill the cache on a machine with network access: `hf download {repository}`"


def is_repository(name: str) -> bool:
    """Return whether a name can be that of a repository on the Hub."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~"))


def probe(address: str) -> None:
    """Raise OSError unless a server responds, because retries would take minutes if the host is unreachable."""
    parts = urlsplit(address)
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}/", method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()  # any status is a response
