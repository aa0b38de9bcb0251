"""From tables to runs: each run once, however many tables and lines it stands for, with everything that decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import tvr_lightning.data
from tvr_lightning.reproduce.runs.fingerprint import (
    code_fingerprint,
    config_fingerprint,
    data_fingerprint,
    digest,
    model_fingerprint,
    named_fingerprint,
    read_recipe,
    weights_fingerprint,
)
from tvr_lightning.reproduce.tables import TableError, TableRecipe, TableRun

FIXTURE_SEED = 0
Share = Literal["nothing", "encoder", "features"]
Verb = Literal["fit", "test", "extract"]
# What trains the shared encoder: the plainest head there is, so that the encoder leans to no method.
SHARED_METHOD, SHARED_DATASET = "clip4clip", "msrvtt"
SHARED_RECIPES = {"encoder": "fixture-shared.yaml", "features": "fixture-features.yaml"}
# Options that name what a run reads in addition to its dataset.
DATA_FILES = ("data.init_args.extra_captions", "data.init_args.features")
MODEL_FILES = (
    "model.init_args.encoder.init_args.architecture",
    "model.init_args.encoder.init_args.tokenizer",
    "model.init_args.encoder.init_args.trained_in",
    "model.init_args.encoder.init_args.weights",
    "model.init_args.audio_encoder.init_args.weights",
    "model.init_args.pretrained",
)
SHARED_SETTINGS = {"model.init_args.clip4clip.similarity_header.class_path": "MeanP"}


@dataclass(frozen=True)
class Setting:
    """What holds for every run of an invocation.

    Attributes:
        recipes: folder of the recipes.
        root: parent folder of the datasets: $TVR_DATA, or where the synthetic ones are written.
        fixture_videos: videos per synthetic dataset, or None with real data.
        overlay: a recipe on top of every run's recipes, below the table's own values; or None.
        seeds: of the runs; empty for each recipe's own.
        share: what the synthetic runs share: `nothing`, every run trains its own encoder from random weights;
            `encoder`, each goes on from one that was trained once, on the synthetic MSR-VTT; `features`, that one
            stays frozen, its features of a dataset are stored once, and runs of a further backbone are left out,
            since they would be the same.
    """

    recipes: Path
    root: Path
    fixture_videos: int | None = None
    overlay: Path | None = None
    seeds: tuple[int, ...] = ()
    share: Share = "nothing"


@dataclass
class PlannedRun:
    """One run to make, or made already.

    Attributes:
        key: fingerprint of all that decides it; its card bears it.
        name: `<table>/<run>` of the first line it stands for.
        claims: every `<table>/<run>` that it stands for.
        verb: `fit`; `test` where another run or nobody trained the weights; `extract` where features are stored.
        configs: recipe files, as on the command line.
        settings: the table's own values, nested as in a recipe, on top of them.
        overrides: command-line style, on top of all.
        seed: of the run; None for the recipe's own.
        dataset: name of the layout, such as `msrvtt`.
        fixture_videos: videos of the synthetic dataset that it runs on; None with real data.
        share: what the runs of its invocation share, as of `Setting`.
        fingerprints: of `config`, `code`, `data`, `weights`, and `files` that options name besides.
        trained_by: key of the run that trained the weights, for `test`.
        encoder_from: key of the run that trained the encoder it starts with, or None.
        store: key of the run that stored the features it reads, or None.
        overlay: `path` and `digest` of the recipe that was laid on top of it for the whole invocation, or None.
    """

    key: str
    name: str
    claims: list[str]
    verb: Verb
    configs: list[str]
    settings: dict[str, Any]
    overrides: list[str]
    seed: int | None
    dataset: str
    fixture_videos: int | None
    share: Share
    fingerprints: dict[str, str]
    trained_by: str | None = None
    encoder_from: str | None = None
    store: str | None = None
    overlay: dict[str, str] | None = None

    @property
    def needs(self) -> dict[str, str]:
        """Keys of the runs that must be finished before it, by what it takes of them."""
        made = {"weights": self.trained_by, "encoder": self.encoder_from, "features": self.store}
        return {name: key for name, key in made.items() if key is not None}

    def plain(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass
class Plan:
    """The runs of some tables, in an order in which every run comes after those whose weights or features it takes.

    Attributes:
        tables: the tables.
        runs: by key.
        chosen: `<table>/<run>` to the keys of its seeds.
        setting: what holds for all of them.
    """

    tables: list[TableRecipe]
    setting: Setting
    runs: dict[str, PlannedRun] = field(default_factory=dict)
    chosen: dict[str, list[str]] = field(default_factory=dict)

    def runs_of(self, table: TableRecipe) -> dict[str, list[PlannedRun]]:
        """Return the runs that stand for a table's lines, one per seed, by their names in it."""
        keys = {run.name: self.chosen.get(f"{table.name}/{run.name}", []) for run in table.runs}
        return {name: [self.runs[key] for key in found] for name, found in keys.items()}


def make_plan(tables: Sequence[TableRecipe], setting: Setting, only: Sequence[str] = ()) -> Plan:
    """Plan the runs of tables.

    Args:
        tables: what to reproduce.
        setting: data, seeds and what lies on top of every run.
        only: `<run>` or `<table>/<run>` to restrict them to; all where empty. What trains their weights is added.

    Raises:
        TableError: `only` names a run that no table has, or none that `share` leaves.
    """
    if setting.share != "nothing" and setting.fixture_videos is None:
        raise TableError(
            f"--share {setting.share} is only for the synthetic datasets. With real data, runs share the encoder's "
            "published weights (recipes/features.yaml trains heads on their stored features)."
        )
    plan = Plan(list(tables), setting)
    known = {f"{table.name}/{run.name}" for table in tables for run in table.runs}
    for name in only:
        if not any(name in (claim, claim.partition("/")[2]) for claim in known):
            raise TableError(f"--only {name!r} is not a run of these tables. Available: {', '.join(sorted(known))}")
    for table in tables:
        runs = {run.name: run for run in table.runs}
        for run in table.runs:
            left_out = setting.share == "features" and run.backbone is not None
            if not left_out and (not only or run.name in only or f"{table.name}/{run.name}" in only):
                for seed in setting.seeds or (None,):
                    _add(plan, table, runs, run, seed)
    if only and not plan.runs:
        raise TableError(
            f"--only {', '.join(only)} leaves no runs, since --share features omits runs with other backbones"
        )
    return plan


def _add(plan: Plan, table: TableRecipe, runs: Mapping[str, TableRun], run: TableRun, seed: int | None) -> PlannedRun:
    trained_by = _add(plan, table, runs, runs[run.trained_by], seed) if run.trained_by else None
    claim, share = f"{table.name}/{run.name}", plan.setting.share
    files = _files(plan.setting, run)
    encoder = _shared_encoder(plan) if share != "nothing" else None
    dataset = _dataset(claim, files, run.settings)
    store = _shared_store(plan, encoder, dataset) if encoder is not None and share == "features" else None
    planned = _planned(
        plan,
        claim,
        files,
        run.settings,
        verb="fit" if run.trains else "test",
        seed=seed,
        trained_by=trained_by,
        encoder=encoder,
        store=store,
    )
    if claim not in planned.claims:
        planned.claims.append(claim)
    keys = plan.chosen.setdefault(claim, [])
    if planned.key not in keys:
        keys.append(planned.key)
    return planned


def _files(setting: Setting, run: TableRun) -> list[Path]:
    """The recipes of a run, later ones on top; the fixture's own encoder stands for every backbone."""
    files = list(run.config)
    if setting.fixture_videos is not None:
        files += [setting.recipes / "fixture.yaml", *([run.on_fixture] if run.on_fixture else [])]
        if setting.share != "nothing":
            files.append(setting.recipes / SHARED_RECIPES[setting.share])
    elif run.backbone is not None:
        files.append(run.backbone)
    return [*files, *([setting.overlay] if setting.overlay is not None else [])]


def _planned(
    plan: Plan,
    name: str,
    files: Sequence[Path],
    settings: Mapping[str, Any],
    *,
    verb: Verb = "fit",
    seed: int | None = None,
    trained_by: PlannedRun | None = None,
    encoder: PlannedRun | None = None,
    store: PlannedRun | None = None,
) -> PlannedRun:
    """Plan a run, or find the one of the plan that does the same."""
    setting, dataset = plan.setting, _dataset(name, files, settings)
    contents = _contents(files, settings)
    fingerprints = {
        "config": config_fingerprint(files, nested(settings)),
        "code": code_fingerprint(),
        "data": _data(setting, dataset),
        "weights": f"run {encoder.key}" if encoder else _weights(setting, contents),
        "files": _further_files(contents),
    }
    overrides = [f"--data.init_args.root={setting.root}"]
    if seed is not None:
        overrides.append(f"--seed_everything={seed}")
    # A seed that is asked for and is the recipe's own makes the same run.
    decided = _last(contents, "seed_everything") if seed is None else seed
    overlay = setting.overlay
    keys = [run.key if run else None for run in (trained_by, encoder, store)]
    planned = PlannedRun(
        key=digest(fingerprints, decided, verb, keys),
        name=name,
        claims=[],
        verb=verb,
        configs=[str(path.absolute()) for path in files],
        settings=nested(settings),
        overrides=overrides,
        seed=seed,
        dataset=dataset,
        fixture_videos=setting.fixture_videos,
        share=setting.share,
        fingerprints=fingerprints,
        trained_by=keys[0],
        encoder_from=keys[1],
        store=keys[2],
        overlay={"path": str(overlay.absolute()), "digest": config_fingerprint([overlay], {})} if overlay else None,
    )
    return plan.runs.setdefault(planned.key, planned)


def _dataset(name: str, files: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """The layout that recipes name."""
    kind = str(_last(_contents(files, settings), "data.class_path")).rpartition(".")[2]
    if kind not in tvr_lightning.data.__all__:
        raise TableError(f"{name}: the recipes name no dataset (data.class_path is {kind})")
    return str(getattr(tvr_lightning.data, kind).directory)


def _shared_encoder(plan: Plan) -> PlannedRun:
    """The run that trains the encoder that all others start from."""
    names = (f"{SHARED_METHOD}.yaml", f"data/{SHARED_DATASET}.yaml", "fixture.yaml", "fixture-encoder.yaml")
    return _planned(plan, "shared/encoder", _with_overlay(plan.setting, names), SHARED_SETTINGS)


def _shared_store(plan: Plan, encoder: PlannedRun, dataset: str) -> PlannedRun:
    """The run that stores the shared encoder's features of a dataset; GAID's recipe names the sound too."""
    names = ("gaid.yaml", f"data/{dataset}.yaml", "fixture.yaml", SHARED_RECIPES["features"])
    files = _with_overlay(plan.setting, names)
    return _planned(plan, f"shared/features-{dataset}", files, {}, verb="extract", encoder=encoder)


def _with_overlay(setting: Setting, names: Sequence[str]) -> list[Path]:
    return [*(setting.recipes / name for name in names), *([setting.overlay] if setting.overlay is not None else [])]


def _data(setting: Setting, dataset: str) -> str:
    if setting.fixture_videos is not None:
        return f"synthetic, {setting.fixture_videos} videos, seed {FIXTURE_SEED}, {dataset}"
    return data_fingerprint(setting.root / dataset)


def _further_files(contents: Sequence[dict[str, Any]]) -> str:
    """The fingerprint of files that options name; `none` where they name none."""
    found: dict[str, str | None] = {}
    for options, fingerprint in ((DATA_FILES, named_fingerprint), (MODEL_FILES, model_fingerprint)):
        values = {option: _last(contents, option) for option in options}
        found |= {option: fingerprint(str(value)) for option, value in values.items() if value is not None}
    read = {option: fingerprint for option, fingerprint in found.items() if fingerprint is not None}
    return digest(read) if read else "none"


def _weights(setting: Setting, contents: Sequence[dict[str, Any]]) -> str:
    if setting.fixture_videos is not None:
        return "random"
    architecture = _last(contents, "model.init_args.encoder.init_args.architecture")
    weights = _last(contents, "model.init_args.encoder.init_args.weights")
    return f"{architecture}: {weights_fingerprint(weights)}"


def _contents(files: Sequence[Path], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*(read_recipe(path) for path in files), nested(settings)]


def _last(contents: Sequence[dict[str, Any]], option: str) -> Any:
    """The value that the last of some recipes to name an option gives it, be it null; None where none does."""
    *parents, name = option.split(".")
    found = None
    for content in contents:
        inner: Any = content
        for key in parents:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and name in inner:
            found = inner[name]
    return found


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted options as nested mappings, as a recipe has them.

    Args:
        settings: such as `{"data.init_args.split": "7k"}`.
    """
    found: dict[str, Any] = {}
    for option, value in settings.items():
        *parents, name = option.split(".")
        inner = found
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return found
