"""Trained methods on the Hugging Face Hub: what was measured of them goes along, and nothing is pushed by halves."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import yaml
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tvr_lightning.checkpoints import RECORD, CheckpointError, named_classes, read_checkpoint
from tvr_lightning.encoders.hub import probe
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.verdict import NOT_AUDITED, Verdict
from tvr_lightning.evaluation.weights import Weights, weights_of
from tvr_lightning.trained import Trained

PREFIX = "hf:"
"""What a hub's name begins with in the place of a checkpoint's path."""
WEIGHTS, CONFIG, RECIPE, RESULTS, CARD = "model.safetensors", "config.json", "recipe.yaml", "results.json", "README.md"
KEPT = ("hyper_parameters", "datamodule_hyper_parameters", RECORD, "epoch", "global_step", "pytorch-lightning_version")
"""Entries of a checkpoint besides its tensors."""
PLACES = ("root", "features", "captions")
"""Options of the data that name folders of the machine."""
PRIVATE = ("checkpoint", "config", "environment", "skipped")
"""Parts of results that name paths, the machine and its user; the recipe says what was run."""
# Of no answer, a refused one, or none over a network that is not there, whichever library asks.
_FAILURES: tuple[Any, ...] = (OSError, *HfHubHTTPError.__bases__)


class HubError(UserError, RuntimeError):
    """What is to be pushed is not whole, or the hub refuses or does not answer; says which."""


def push_to_hub(
    checkpoint: str | Path,
    name: str,
    *,
    results: str | Path | None = None,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Publish a trained method with its recipe, its results and a card that is made of them, in one commit.

    Args:
        checkpoint: that `tvr fit` wrote.
        name: `user/name`, which must be new.
        results: that `tvr fit` or `tvr test` measured of these weights; by default results.json in the run's folder.
        private: whether only its owner sees it.
        token: of the hub; by default the one that `hf auth login` stored, or HF_TOKEN.

    Returns:
        Its address.

    Raises:
        CheckpointError: there is no such checkpoint, or it holds no recipe.
        HubError: no results, no token, a name that exists, or no network; nothing is left on the hub.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = _write(Path(checkpoint), None if results is None else Path(results), name, Path(folder))
        api = _api(token)
        if (token or huggingface_hub.get_token()) is None:
            raise HubError("The Hub needs a token. Run `hf auth login` or set HF_TOKEN. Nothing was pushed.")
        with _explained(name, "nothing was pushed"):
            if api.repo_exists(name):
                raise HubError(f"{name} already exists on {api.endpoint}. Choose another name. Nothing was pushed.")
            api.create_repo(name, private=private)
            try:
                added = [CommitOperationAdd(path.name, path) for path in files]
                api.create_commit(name, added, commit_message="Publish a trained method")
            except BaseException:
                api.delete_repo(name)  # a name without a model would be half of it
                raise
    return f"{api.endpoint}/{name}"


@contextmanager
def from_hub(name: str) -> Iterator[Path]:
    """Fetch a published method, and give it as a checkpoint while the context lasts.

    One that was fetched before is there without a network, too.

    Args:
        name: `user/name`, or `user/name@revision`.

    Raises:
        HubError: there is none of that name, it is none that `push_to_hub` wrote, or the hub does not answer.
    """
    repository, _, revision = name.partition("@")
    endpoint = _api(None).endpoint
    with _explained(name, f"looked for it on {endpoint} and in {huggingface_hub.constants.HF_HUB_CACHE}"):
        config, weights = _fetched(repository, revision or None, endpoint)
    try:
        saved = json.loads(config.read_text(encoding="utf-8"))
        content = {key: saved[key] for key in KEPT if key in saved} | {"state_dict": load_file(weights)}
    except (ValueError, TypeError, KeyError, SafetensorError) as error:
        said = str(error).splitlines()[0]
        raise HubError(f"{PREFIX}{name} does not contain a method written by push_to_hub ({said})") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{repository.replace('/', '--')}.ckpt"
        torch.save(content, path)
        yield path


def _fetched(repository: str, revision: str | None, endpoint: str) -> tuple[Path, Path]:
    """Return the files of a published method, from the cache alone where the hub does not answer."""
    unreachable = None
    try:
        probe(endpoint)
    except OSError as error:
        unreachable = error
    fetch = partial(
        huggingface_hub.hf_hub_download,
        repository,
        revision=revision,
        endpoint=endpoint,
        local_files_only=unreachable is not None,
    )
    try:
        return Path(fetch(CONFIG)), Path(fetch(WEIGHTS))
    except LocalEntryNotFoundError:
        if unreachable is None:
            raise
        raise unreachable from None


def _api(token: str | None) -> HfApi:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)


@contextmanager
def _explained(name: str, outcome: str) -> Iterator[None]:
    try:
        yield
    except HFValidationError as error:
        raise HubError(f"{name!r} is not a valid Hub name (user/name); {outcome}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        reason = {
            401: "there is no such model, or the token was rejected",
            403: "the token does not have the permission",
            404: "there is no such model",
        }
        said = reason.get(status or 0) or " ".join(str(error).split())[:300]
        raise HubError(f"{name}: {said}; {outcome}") from error
    except _FAILURES as error:
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise HubError(f"{name}: the Hub cannot be reached ({said}); {outcome}") from error


def _write(checkpoint: Path, results: Path | None, name: str, folder: Path) -> list[Path]:
    """Write all files of a published method to a folder; what is wrong with them is found here."""
    saved = read_checkpoint(checkpoint)
    try:
        own = [kind.rpartition(".")[0] for kind in named_classes([saved.get(key) for key in KEPT])]
        recipe = Trained(checkpoint, [], own).recipe()  # whoever pushes it has trained it with them
        recipe["data"]["init_args"] = {k: v for k, v in recipe["data"]["init_args"].items() if k not in PLACES}
    except (CheckpointError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint} contains no recipe, which is required to publish a method ({error}). Nothing was pushed."
        ) from error
    found = results or checkpoint.parent.parent / RESULTS
    try:
        measured = json.loads(found.read_text(encoding="utf-8"))
        card = card_of(name, measured, recipe)
    except OSError as error:
        raise HubError(
            f"{found}: {error.strerror}. The model card needs results. Run tvr test --ckpt_path {checkpoint}, and pass "
            "the file as results=. Nothing was pushed."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{found} has no results of tvr fit or tvr test ({error!r}). Nothing was pushed.") from error
    if measured.get("weights") != _plain(weights_of(saved)):
        raise HubError(f"{found} contains results of other weights than {checkpoint}. Nothing was pushed.")
    texts = {
        CARD: card,
        RECIPE: yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
        CONFIG: json.dumps(_public(saved), indent=2),
        RESULTS: json.dumps(
            {key: value for key, value in measured.items() if key not in PRIVATE}
            | {"weights": measured["weights"] | {"run": None}},
            indent=2,
        ),
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    save_file(
        {key: value.detach().clone().contiguous() for key, value in saved["state_dict"].items()}, folder / WEIGHTS
    )
    return [folder / file for file in (*texts, WEIGHTS)]


def _public(saved: dict[str, Any]) -> dict[str, Any]:
    found = {key: saved[key] for key in KEPT if key in saved}
    found["datamodule_hyper_parameters"] = {
        name: value for name, value in found["datamodule_hyper_parameters"].items() if name not in PLACES
    }
    if RECORD in found:
        found[RECORD] = found[RECORD] | {"run": None}
    return found


def _plain(weights: Any) -> Any:
    return json.loads(json.dumps(vars(weights)))


def card_of(name: str, results: dict[str, Any], recipe: dict[str, Any]) -> str:
    """Return a model card as markdown: what it is, what was measured and of what, how to use it and for what.

    Args:
        name: `user/name`.
        results: content of a results.json.
        recipe: that the method was trained with.

    Raises:
        KeyError: the results lack what a card must state.
    """
    rows = [
        f"| {direction} | "
        + " | ".join(_figure(results[key][column]) for column in ("R@1", "R@5", "R@10", "MdR", "MnR"))
        for direction, key in (("text-to-video", "text_to_video"), ("video-to-text", "video_to_text"))
    ]
    weights = replace(Weights(**results["weights"]), run=None)
    remarks = [*results["warnings"], *(["PARTIAL: not the whole split was ranked"] if results["partial"] else [])]
    if results["post_processing"]:
        remarks.append(f"scores were normalized by {results['post_processing']}")
    audit = results.get("audit")
    remarks.append(NOT_AUDITED if audit is None else str(Verdict(**audit)))
    tags = yaml.safe_dump({"library_name": "tvr-lightning", "tags": ["text-video-retrieval", "video-search"]})
    return "\n".join(
        [
            f"---\n{tags}---",
            f"# {name}",
            f"{results['method']}, a text-video retrieval method, trained with tvr-lightning on "
            f"{results.get('trained_on') or recipe['data']['class_path'].rpartition('.')[2]}.",
            "## Results",
            f"{results['dataset']} ({results['protocol']}), {results['texts']} texts and {results['videos']} videos; "
            f"{weights.caption()}; seed {results['seed']}, precision {results['precision']}.\n",
            "| direction | R@1 | R@5 | R@10 | MdR | MnR |\n|---|---|---|---|---|---|",
            *[f"{row} |" for row in rows],
            "",
            *[f"- {remark}" for remark in remarks],
            "## Use",
            f'```python\nimport tvr_lightning\n\nmodel = tvr_lightning.load("{PREFIX}{name}")\n'
            'scores = model.score(["a dog catches a frisbee"], ["a.mp4", "b.mp4"])\n```',
            "## Intended use",
            "Ranking videos for a sentence and sentences for a video, in research and for search in your own videos. "
            "The model reflects the gaps and biases of its training data and its encoder. Scores rank the videos of a "
            "collection; they are not probabilities. The model is not intended for identifying people or making "
            "decisions about them. The licenses of the training data and of the encoder's weights also apply to these "
            "weights.",
            "## Recipe",
            f"```yaml\n{yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)}```",
            "",
        ]
    )


def _figure(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.1f}"
