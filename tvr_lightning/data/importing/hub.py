"""Resumable download of public datasets from the Hugging Face Hub, without conversion."""

import shutil
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from tvr_lightning.errors import UserError

# Base class of the HTTP library's connection errors; huggingface_hub uses different libraries in different releases.
NO_ANSWER: type[Exception] = HfHubHTTPError.__bases__[0]
GUIDE = "For the source and terms of each dataset, see docs/datasets.md."
REPOSITORIES = {
    "msrvtt": ("friedrichor/MSR-VTT", ["msrvtt_*.json", "MSRVTT_Videos.zip"]),
    "msvd": ("friedrichor/MSVD", ["msvd_*.json", "MSVD_Videos.zip"]),
    "didemo": ("friedrichor/DiDeMo", ["didemo_*.json", "DiDeMo_Videos_mp4_*.tar*"]),
    "activitynet": ("friedrichor/ActivityNet_Captions", ["activitynet_captions_*.json", "ActivityNet_Videos.tar*"]),
}
"""Third-party copies of the datasets without a license, for which the terms of the original datasets apply, and the
patterns of the files that `tvr data import` reads."""


def fetch(dataset: str, folder: Path, annotations_only: bool = False, endpoint: str | None = None) -> list[Path]:
    """Download the files of a dataset from the Hub into a folder, and return their paths; existing files are kept.

    An interrupted connection is resumed up to five times. After a failed call, an incomplete file is downloaded again.
    The default `endpoint` is that of huggingface_hub (HF_ENDPOINT).
    """
    if dataset not in REPOSITORIES:
        raise UserError(f"{dataset} cannot be downloaded from the Hub, only {', '.join(REPOSITORIES)}. {GUIDE}")
    repository, patterns = REPOSITORIES[dataset]
    patterns = [pattern for pattern in patterns if pattern.endswith(".json") or not annotations_only]
    try:
        info = huggingface_hub.HfApi(endpoint).dataset_info(repository, files_metadata=True)
        sizes = {
            item.rfilename: item.size or 0
            for item in info.siblings or []
            if any(fnmatch(item.rfilename, pattern) for pattern in patterns)
        }
        if not sizes:
            raise UserError(f"{repository} on the Hub no longer contains any of {', '.join(patterns)}. {GUIDE}")
        folder.mkdir(parents=True, exist_ok=True)
        needed = sum(size for name, size in sizes.items() if not (folder / name).is_file())
        if needed > (free := shutil.disk_usage(folder).free):
            space = f"{free / 1e9:.1f} GB of free space, but {needed / 1e9:.1f} GB are needed"
            raise UserError(f"{folder} has {space}. Free disk space.")
        for name in sizes:
            huggingface_hub.hf_hub_download(
                repository, name, repo_type="dataset", revision=info.sha, local_dir=folder, endpoint=endpoint
            )
    except RepositoryNotFoundError as error:
        raise UserError(f"{repository} on the Hub is no longer public ({_first(error)}). {GUIDE}") from error
    except (NO_ANSWER, OSError) as error:
        raise UserError(
            f"{repository} could not be downloaded from {endpoint or huggingface_hub.constants.ENDPOINT} "
            f"({_first(error)}). Rerun the command to download the missing files. {GUIDE}"
        ) from error
    return [folder / name for name in sizes]


def _first(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
