"""From tables to runs: each run once, as decided by digests of its recipe and of the files that it reads."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any, Literal

import tvr_lightning.data
from tvr_lightning.audit import AUDIT_VERSION
from tvr_lightning.config import recipe_files
from tvr_lightning.config.check import Source, merge
from tvr_lightning.config.recipe import recipe_schema
from tvr_lightning.config.recipe_files import merged, read_recipe
from tvr_lightning.config.roles import options_with
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Role, roles_of
from tvr_lightning.reproduce.tables import TableRecipe, TableRun
from tvr_lightning.training.options import flat_options

# Raise it when a change to the code may change results: all finished runs are then made again.
RESULTS_VERSION = 1
FIXTURE_SEED = 0
SharedResource = Literal["nothing", "encoder", "features"]
RunCommand = Literal["fit", "test", "extract"]
Need = Literal["weights", "encoder", "features"]
ARCHITECTURE = "model.init_args.encoder.init_args.architecture"
WEIGHTS = "model.init_args.encoder.init_args.weights"
LOCAL_DIR = "local-dir:"  # open_clip's prefix for a folder with a whole model
ANNOTATIONS = {".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet"}


@dataclass(frozen=True)
class Setting:
    """Settings for all runs of one `tvr reproduce`."""

    recipes: Path  # folder
    root: Path  # parent folder of the datasets
    fixture_videos: int | None = None  # per synthetic dataset; None with real data
    overlay: Path | None = None  # recipe over those of every run, but not over the table's own values
    seeds: tuple[int, ...] = ()  # empty for each recipe's own
    # encoder: trained once on the synthetic MSR-VTT; features: stored once with that encoder
    share: SharedResource = "nothing"


@dataclass
class PlannedRun:
    """One run; runs that it needs are named by their keys."""

    key: str  # digest of all that decides its results
    name: str  # <table>/<run> of the first row that it stands for
    claims: list[str]  # every <table>/<run> that it stands for
    verb: RunCommand
    configs: list[str]  # recipe files, later ones over earlier ones
    settings: dict[str, Any]  # the table's own values, nested, over the recipes
    overrides: list[str]  # command-line options over all of these
    seed: int | None  # None for the recipe's own
    dataset: str  # folder name, such as msrvtt
    fixture_videos: int | None
    share: SharedResource
    fingerprints: dict[str, str]  # of config, code, data, weights, and files
    needs: dict[Need, str]  # runs that must finish first, by what it takes from them
    overlay: str | None = None

    @property
    def kind(self) -> tuple[str, int | None, bool]:
        """Command, number of synthetic videos, and sharing: equal for runs of similar duration."""
        return self.verb, self.fixture_videos, "encoder" in self.needs


@dataclass
class Plan:
    """The runs of some tables by key, each after the runs that it needs."""

    setting: Setting
    runs: dict[str, PlannedRun] = field(default_factory=dict)


def make_plan(tables: Sequence[TableRecipe], setting: Setting, only: Sequence[str] = ()) -> Plan:
    """Plan the runs of tables: those named in `only` as `<run>` or `<table>/<run>`, and the runs that these need."""
    if setting.share != "nothing" and setting.fixture_videos is None:
        raise UserError(
            f"--share {setting.share} is only for the synthetic datasets. With real data, runs share the encoder's "
            "published weights (recipes/features.yaml trains heads on their stored features)."
        )
    plan = Plan(setting)
    known = {f"{table.name}/{run.name}": (table, run) for table in tables for run in table.runs}
    if unknown := set(only) - known.keys() - {run.name for _, run in known.values()}:
        raise UserError(f"--only {min(unknown)!r} is not a run of these tables. Available: {', '.join(sorted(known))}")
    for claim, (table, run) in known.items():
        # The recipes of sharing are for retrieval, and features are those of one backbone.
        omitted = {"nothing": None, "encoder": run.on_fixture, "features": run.on_fixture or run.backbone}
        if omitted[setting.share] is None and (not only or run.name in only or claim in only):
            for seed in setting.seeds or (None,):
                _add(plan, table, run, seed)
    if only and not plan.runs:
        raise UserError(
            f"--only {', '.join(only)} leaves no runs, since --share {setting.share} omits question answering, and "
            "--share features also other backbones"
        )
    return plan


def _add(plan: Plan, table: TableRecipe, run: TableRun, seed: int | None) -> PlannedRun:
    """Plan a table's run and the runs that it needs."""
    setting = plan.setting
    claim = f"{table.name}/{run.name}"
    needs: dict[Need, str] = {}
    if run.trained_by is not None:
        trainer = next(other for other in table.runs if other.name == run.trained_by)
        needs["weights"] = _add(plan, table, trainer, seed).key
    # The fixture's own encoder replaces every backbone.
    own = [run.backbone] if setting.fixture_videos is None else [setting.recipes / "fixture.yaml", run.on_fixture]
    files = [*run.config, *filter(None, own)]
    if setting.share != "nothing":
        # Trained with the plainest head, so that the encoder favors no method.
        names = ["clip4clip.yaml", "data/msrvtt.yaml", "fixture.yaml", "fixture-encoder.yaml"]
        head = {"model.init_args.clip4clip.similarity_header.class_path": "MeanP"}
        recipes = [setting.recipes / name for name in names]
        needs["encoder"] = _plan_run(plan, "shared/encoder", recipes, head, "fit", None, {}).key
        files.append(setting.recipes / f"fixture-{'shared' if setting.share == 'encoder' else 'features'}.yaml")
    if setting.share == "features":
        recipe = resolve(files, nested(run.settings))
        kind = _dataset(claim, recipe)
        dataset = kind.directory
        # GAID's recipe asks for audio features too.
        names = ["gaid.yaml", f"data/{dataset}.yaml", "fixture.yaml", "fixture-features.yaml"]
        # Which videos, and which part of each; fixture-features.yaml sets the other options of reading.
        given = recipe["data"]["init_args"]
        roles = roles_of(kind)
        selecting = [name for name in given if {Role.DATASET} <= roles[name] <= {Role.DATASET, Role.READING}]
        reading = {f"data.init_args.{name}": given[name] for name in selecting}
        recipes = [setting.recipes / name for name in names]
        shared = f"shared/features-{dataset}"
        encoder: dict[Need, str] = {"encoder": needs["encoder"]}
        needs["features"] = _plan_run(plan, shared, recipes, reading, "extract", None, encoder).key
    planned = _plan_run(plan, claim, files, run.settings, "fit" if run.trains else "test", seed, needs)
    if claim not in planned.claims:
        planned.claims.append(claim)
    return planned


def _plan_run(
    plan: Plan,
    name: str,
    files: Sequence[Path],
    settings: Mapping[str, Any],
    verb: RunCommand,
    seed: int | None,
    needs: dict[Need, str],
) -> PlannedRun:
    """Plan a run, or return the one of the plan that does the same."""
    setting = plan.setting
    overlay = setting.overlay
    own = nested(settings)
    files = [*files, *([overlay] if overlay else [])]
    recipe = resolve(files, own)
    dataset = _dataset(name, recipe).directory
    named = options_with(Role.FILE) - {"root"}
    read = {
        option: found
        for section, content in recipe.items()
        for option, value in flat_options(section, content)
        if option.rpartition(".")[2] in named
        and (found := file_fingerprint(str(value), not option.startswith("data."))) is not None
    }
    if setting.fixture_videos is None:
        data = data_fingerprint(setting.root / dataset)
        weights = lookup(recipe, WEIGHTS)
        tag = "random" if weights in (None, "none") else f"tag {weights}"
        of_weights = f"{lookup(recipe, ARCHITECTURE)}: {read.get(WEIGHTS, tag)}"
    else:
        data = f"synthetic, {setting.fixture_videos} videos, seed {FIXTURE_SEED}, {dataset}"
        of_weights = f"run {needs['encoder']}" if "encoder" in needs else "random"
    fingerprints = deciding(files, own)
    fingerprints |= {"data": data, "weights": of_weights, "files": digest(read) if read else "none"}
    # The recipe's own seed, chosen explicitly, makes the same run.
    key = digest(fingerprints, lookup(recipe, "seed_everything") if seed is None else seed, verb, needs)
    configs = [str(path.absolute()) for path in files]
    overrides = [f"--data.init_args.root={setting.root}", *([] if seed is None else [f"--seed_everything={seed}"])]
    planned = PlannedRun(
        key=key, name=name, claims=[], verb=verb, configs=configs, settings=own, overrides=overrides, seed=seed,
        dataset=dataset, fixture_videos=setting.fixture_videos, share=setting.share, fingerprints=fingerprints,
        needs=needs, overlay=str(overlay.absolute()) if overlay else None,
    )  # fmt: skip
    return plan.runs.setdefault(key, planned)


def deciding(configs: Sequence[Path], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints that are checked again when a run starts: of its recipe, and the version of the code."""
    return {"config": digest(resolve(configs, settings)), "code": f"{RESULTS_VERSION}, audit {AUDIT_VERSION}"}


def _dataset(name: str, recipe: dict[str, Any]) -> type[TextVideoDataModule]:
    kind = str(lookup(recipe, "data.class_path")).rpartition(".")[2]
    if kind not in tvr_lightning.data.__all__:
        raise UserError(f"{name}: the recipes name no dataset (data.class_path is {kind})")
    found: type[TextVideoDataModule] = getattr(tvr_lightning.data, kind)
    return found


def digest(*parts: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def resolve(recipes: Sequence[Path], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of recipes, later ones over earlier ones, with nested settings over all of them."""
    sources = [Source(f"--config {path}: ", _read(path, path.stat().st_mtime_ns)) for path in recipes]
    return merge([*sources, Source("", dict(settings))], _schema())


_schema = cache(recipe_schema)


@cache
def _read(path: Path, _changed: int) -> dict[str, Any]:
    return read_recipe(path)  # hundreds of runs share a few files, and YAML is slow


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted options, such as `{"data.init_args.split": "7k"}`, as nested mappings, as in a recipe."""
    return reduce(merged, (recipe_files.nested(option, value) for option, value in settings.items()), {})


def lookup(recipe: Any, option: str) -> Any:
    """Return the value of a dotted option, or None if the recipe does not set it."""
    for name in option.split("."):
        recipe = recipe.get(name) if isinstance(recipe, dict) else None
    return recipe


def file_fingerprint(name: str, every_file: bool) -> str | None:
    """Return the digest of a file or folder, or None if it does not exist.

    Unless `every_file`, only annotations are read, and other files, such as videos, count by name and size.
    """
    path = Path(name.removeprefix(LOCAL_DIR)).expanduser()
    if path.is_file():
        return _content(path, path.stat().st_mtime_ns)
    if not path.is_dir():
        return None
    found: list[tuple[str, str | int]] = []
    seen: set[str] = set()  # folders; linked ones may link back
    for place, folders, names in os.walk(path, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        for file in filter(Path.is_file, (Path(place) / name for name in names)):
            status = file.stat()
            is_read = every_file or file.suffix.lower() in ANNOTATIONS
            content = _content(file, status.st_mtime_ns) if is_read else status.st_size
            found.append((str(file.relative_to(path)), content))
    return digest(sorted(found))


@cache
def data_fingerprint(folder: Path) -> str:
    """Return the digest of a dataset's folder, or `absent`."""
    return file_fingerprint(str(folder), every_file=False) or "absent"


@cache
def _content(path: Path, _changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
