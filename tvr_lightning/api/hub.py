"""Trained methods on the Hugging Face Hub: weights, recipe, results, and a model card made of them."""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tvr_lightning.config.checkpoint_options import TrainedOptions
from tvr_lightning.config.roles import option_roles
from tvr_lightning.data.importing.hub import REPOSITORIES
from tvr_lightning.encoders.hub import probe
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.audit_result import NOT_AUDITED, AuditResult
from tvr_lightning.evaluation.weights import Weights, weights_of
from tvr_lightning.option_types import Role
from tvr_lightning.search.scorer import Scorer, ScorerSource
from tvr_lightning.training.checkpoints import FROZEN, RECORD, CheckpointError

PREFIX = "hf:"  # of the name of a repository on the Hub where a checkpoint's path is expected
WEIGHTS, CONFIG, RECIPE, RESULTS, CARD = "model.safetensors", "config.json", "recipe.yaml", "results.json", "README.md"
KEPT = (  # entries of a checkpoint that are published in addition to its tensors
    "hyper_parameters", "datamodule_hyper_parameters", RECORD, FROZEN, "epoch", "global_step",
    "pytorch-lightning_version",
)  # fmt: skip
PRIVATE = ("checkpoint", "config", "environment", "skipped")  # in results.json; recipe.yaml contains the settings
# Exceptions of a Hub that does not answer; the HTTP library differs between versions of huggingface_hub.
FAILURES: tuple[Any, ...] = (OSError, *HfHubHTTPError.__bases__)
METRICS = ("R@1", "R@5", "R@10", "MdR", "MnR")
DIRECTIONS = {"text-to-video": "text_to_video", "video-to-text": "video_to_text"}


def push_to_hub(
    checkpoint: str | Path,
    name: str,
    *,
    results: str | Path | None = None,
    private: bool = False,
    license: str | None = None,
    trust: Sequence[str] = (),
) -> str:
    """Publish a trained method on the Hub in one commit, and return its address.

    Args:
        checkpoint: File written by `tvr fit`.
        name: `user/name`. A method that was pushed before gets a new revision.
        results: results.json of these weights, written by `tvr fit` or `tvr test`. Default: the one of the run.
        private: Hide a new repository from others.
        license: Identifier of the license for the model card, such as "mit".
        trust: Other modules whose classes the checkpoint may name, as for `load`.

    Raises:
        CheckpointError: The checkpoint is missing or contains no recipe.
        UserError: Results or token are missing, the name contains something else, or the Hub refuses or does not
            answer. The Hub stays as it was.
    """
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(checkpoint), None if results is None else Path(results), name, license, trust, Path(folder))
        if huggingface_hub.get_token() is None:
            raise UserError("The Hub needs a token. Run `hf auth login` or set HF_TOKEN. Nothing was pushed.")
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        with _explained(name, "nothing was pushed"):
            exists = api.repo_exists(name)
            files = {file.rfilename for file in api.model_info(name).siblings or []} if exists else set()
            if files - {".gitattributes"} and not {WEIGHTS, RECIPE} <= files:
                raise UserError(f"{name} already contains something else on {api.endpoint}. Nothing was pushed.")
            if not exists:
                api.create_repo(name, private=private)
            try:
                api.upload_folder(repo_id=name, folder_path=folder, commit_message="Publish a trained method")
            except BaseException:
                if not exists:
                    api.delete_repo(name)  # a repository without a model would remain
                raise
    return f"{api.endpoint}/{name}"


@contextmanager
def from_hub(name: str) -> Iterator[Path]:
    """Download `user/name` or `user/name@revision`, or find it in the cache, and provide it as a checkpoint.

    Raises:
        UserError: There is no such method, `push_to_hub` did not write it, or the Hub does not answer.
    """
    repository, _, revision = name.partition("@")
    endpoint = os.environ.get("HF_ENDPOINT", huggingface_hub.constants.ENDPOINT)
    fetch = partial(huggingface_hub.hf_hub_download, repository, revision=revision or None, endpoint=endpoint)
    with _explained(name, f"looked for it on {endpoint} and in {huggingface_hub.constants.HF_HUB_CACHE}"):
        try:
            probe(endpoint)
        except OSError as unreachable:
            try:
                fetch(WEIGHTS, local_files_only=True)
            except LocalEntryNotFoundError:
                raise unreachable from None
            fetch = partial(fetch, local_files_only=True)
        config = fetch(CONFIG)
        weights = fetch(WEIGHTS)
    try:
        saved = json.loads(Path(config).read_text(encoding="utf-8"))
        content = {key: saved[key] for key in KEPT if key in saved} | {"state_dict": load_file(weights)}
    except (ValueError, TypeError, KeyError, SafetensorError) as error:
        said = str(error).splitlines()[0]
        raise UserError(f"{PREFIX}{name} does not contain a method written by push_to_hub ({said})") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{repository.replace('/', '--')}.ckpt"
        torch.save(content, path)
        yield path


@contextmanager
def _explained(name: str, outcome: str) -> Iterator[None]:
    try:
        yield
    except HFValidationError as error:
        raise UserError(f"{name!r} is not a valid Hub name (user/name); {outcome}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        reason = {
            401: "there is no such model, or the token was rejected",
            403: "the token does not have the permission",
            404: "there is no such model",
        }
        said = reason.get(status or 0) or " ".join(str(error).split())[:300]
        raise UserError(f"{name}: {said}; {outcome}") from error
    except FAILURES as error:
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{name}: the Hub cannot be reached ({said}); {outcome}") from error


def _write(
    checkpoint: Path, results: Path | None, name: str, license: str | None, trust: Sequence[str], folder: Path
) -> None:
    """Write the files of a published method to a folder."""
    trained = TrainedOptions(checkpoint, [], trust)
    saved = trained.saved
    try:
        recipe = trained.recipe().content
    except (CheckpointError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint} contains no recipe, which is required to publish a method ({error}). Nothing was pushed."
        ) from error
    if FROZEN in saved and without_paths(saved["hyper_parameters"]) != saved["hyper_parameters"]:
        # The frozen weights are in a file of this machine, so they are published too.
        del saved[FROZEN]
        saved["state_dict"] = Scorer(ScorerSource(checkpoint=str(checkpoint)), trust=trust).module.state_dict()
    public = {key: saved[key] for key in KEPT if key in saved}
    local = [
        name.rpartition(".")[2] for name, roles in option_roles(recipe["data"], "data").items() if Role.FILE in roles
    ]
    for options in (recipe["data"]["init_args"], public["datamodule_hyper_parameters"]):
        for option in local:  # without root, a recipe uses TVR_DATA
            options.pop(option, None)
    public[RECORD] = public.get(RECORD, {}) | {"run": None}
    recipe = without_paths(recipe)
    found = results or checkpoint.parent.parent / RESULTS
    try:
        measured = json.loads(found.read_text(encoding="utf-8"))
        if measured["weights"] != json.loads(json.dumps(vars(weights_of(saved)))):
            raise UserError(f"{found} contains results of other weights than {checkpoint}. Nothing was pushed.")
        measured = without_paths({key: value for key, value in measured.items() if key not in PRIVATE})
        measured["weights"]["run"] = None
        card = model_card(name, measured, recipe, license)
    except OSError as error:
        raise UserError(
            f"{found}: {error.strerror}. The model card needs results. Run tvr test --ckpt_path {checkpoint}, and pass "
            "its results.json as results. Nothing was pushed."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{found} has no results of tvr fit or tvr test ({error!r}). Nothing was pushed.") from error
    card.save(folder / CARD)
    (folder / RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(without_paths(public), indent=2), encoding="utf-8")
    (folder / RESULTS).write_text(json.dumps(measured, indent=2), encoding="utf-8")
    tensors = {key: value.detach().clone().contiguous() for key, value in saved["state_dict"].items()}
    save_file(tensors, folder / WEIGHTS)


def without_paths(value: Any) -> Any:
    """Return nested options and texts in which a path of this machine is only the name of its file or folder."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    name = _without_folder(value)
    return name if name != value else re.sub(r"[^\s'\"(),;]+", lambda word: _without_folder(word[0]), value)


def _without_folder(text: str) -> str:
    local = text.startswith(("/", "~/")) or ("/" in text and len(text) < 256 and Path(text).exists())
    return Path(text).name if local else text


def model_card(name: str, results: dict[str, Any], recipe: dict[str, Any], license: str | None) -> ModelCard:
    """Return the model card of `user/name` from the content of results.json and the recipe of the training.

    Raises:
        KeyError: A result that the card must state is missing.
    """
    from open_clip import get_pretrained_cfg  # with torchvision, and only needed here

    dataset = recipe["data"]["class_path"].rpartition(".")[2]
    trained_on = results.get("trained_on") or dataset
    repository, _ = REPOSITORIES.get(dataset.lower(), (None, []))
    audit = results.get("audit")
    remarks = [
        *results["warnings"],
        *(["PARTIAL: not the whole split was ranked"] if results["partial"] else []),
        *([f"scores were normalized by {results['post_processing']}"] if results["post_processing"] else []),
        NOT_AUDITED if audit is None else str(AuditResult(**audit)),
    ]
    figures = {direction: [results[key][metric] for metric in METRICS] for direction, key in DIRECTIONS.items()}
    evaluated = [
        EvalResult(
            task_type=f"{direction}-retrieval",
            dataset_type=dataset.lower(),
            dataset_name=results["dataset"],
            dataset_config=results["protocol"],
            dataset_split=results["split"],
            metric_type=metric,
            metric_value=round(value, 2),
        )
        for direction, row in figures.items()
        for metric, value in zip(METRICS, row, strict=True)
        if value is not None and math.isfinite(value)
    ]
    encoder = (recipe["model"]["init_args"].get("encoder") or {}).get("init_args") or {}
    base = get_pretrained_cfg(encoder.get("architecture") or "", encoder.get("weights") or "") or {}
    data = ModelCardData(
        base_model=str(base.get("hf_hub") or "").strip("/") or None,
        datasets=None if repository is None or trained_on.startswith("synthetic") else [repository],
        eval_results=evaluated,
        library_name="tvr-lightning",
        license=license,
        model_name=name.rpartition("/")[2],
        tags=["text-video-retrieval", "video-search"],
    )
    card: ModelCard = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md")),
        name=name,
        prefix=PREFIX,
        results=results,
        trained_on=trained_on,
        weights=Weights(**results["weights"]).caption(),
        metrics=METRICS,
        table={
            direction: ["-" if value is None or not math.isfinite(value) else f"{value:.1f}" for value in row]
            for direction, row in figures.items()
        },
        remarks=remarks,
        recipe=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
    )
    return card
