"""Recipes of tables: the shipped ones match recipes and published rows, and wrong ones are refused."""

from pathlib import Path

import pytest
import yaml
from run_cards import RECIPES, plan_of

from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.published import PRINTED, published_rows
from tvr_lightning.reproduce.tables import known_tables, load_table


def run(config="method.yaml", method="X-Pool", **more):
    return {"config": [config], "row": {"method": method}} | more


def write(folder: Path, **changes) -> Path:
    """A folder of recipes with one small table, changed."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    (folder / "method.yaml").write_text("data: {class_path: MSRVTT}\n")
    table = {"paper": "gare", "table": "1", "runs": {"x-pool": run()}}
    (folder / "tables" / "mine.yaml").write_text(yaml.safe_dump(table | changes))
    return folder


@pytest.mark.parametrize("name", known_tables(RECIPES))
def test_runs_of_shipped_tables_have_published_rows_and_notes_explain_missing_runs(name):
    table = load_table(name, RECIPES)
    printed = {row.entry for row in table.rows}
    assert {run.entry for run in table.runs} <= printed
    assert len({run.entry for run in table.runs}) == len(table.runs)
    if printed - {run.entry for run in table.runs}:
        assert table.note, "published rows without a run need a note with the reason"
    methods = {"GAID", "GAID+DSL", "T-MASS", "T-Mass"}
    leaking = {row.entry for row in table.rows if row.method in methods and row.recall_1 is not None}
    clean = [run for run in table.runs if run.entry in leaking and not run.config[-1].stem.endswith("-as-released")]
    if clean:
        assert "leaks ground truth" in (table.note or ""), [run.name for run in clean]


def test_every_published_table_has_a_recipe():
    numbers = {(row.paper.lower(), row.table) for row in published_rows()}
    have = {(table.paper, table.table) for table in (load_table(name, RECIPES) for name in known_tables(RECIPES))}
    assert numbers <= have
    table = load_table("gare-1", RECIPES)
    assert "HBI" in {row.method for row in table.rows} - {run.entry[5] for run in table.runs}
    table = load_table("gare-10", RECIPES)
    assert (table.runs, {row.method for row in table.rows}) == ((), {"CLIP4Clip vs GARE"})
    table = load_table("ncl-4", RECIPES)
    assert {row.method for row in table.rows if row.recall_1 is not None} == {"SSB", "SSB + NCL"}
    bases = {f"{base} with NCL on MSR-VTT 1k-A" for base in ("X-CLIP", "DRL", "X-Pool")}
    assert {run.shows for run in table.runs if "ncl" in run.name} == bases
    with pytest.raises(UserError, match=r"no table 'gare-0'.*gare-1"):
        load_table("gare-0", RECIPES)


TRAINS = r"run a: trains is .*; omit it, or set it to false without trained_by"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runs": {"a": run("absent.yaml")}}, "run a: there is no recipe"),
        ({"runs": {"a": run(method="X-Pol")}}, "matches 0 published rows.*X-Pool"),
        ({"paper": "tc-mgc", "table": "1b"}, "matches 2 published rows.*ViT-B/16"),
        ({"runs": {"a": {"config": ["method.yaml"], "rows": {}}}}, "run a: missing or unknown rows;"),
        ({"runs": {"a": {"config": ["method.yaml"]}}}, r"run a: set row \(a published row\)"),
        ({"runs": ["a"]}, "runs must be a mapping; use {} if"),
        ({"baseline": "b"}, "baseline 'b' is not a run of this table. Available: x-pool"),
        ({"table": "99"}, "No published row has table '99'"),
        ({"runs": {"a": run(trained_by="b")}}, "run a: trained_by 'b' is not a run of this table that trains"),
        ({"runs": {"a": run(trained_by="b", trains=True)}}, TRAINS),
        ({"runs": {"a": run(trained_by="b", trains=False)}}, TRAINS),
        ({"runs": {"a": run(trained_by="b", trains="no")}}, TRAINS),
        (
            {"runs": {"a": run(), "b": run(row={"method": "X-Pool", "backbone": "ViT-B/32"})}},
            "runs a and b have the same published row",
        ),
    ],
)
def test_errors_in_a_table_name_the_file_and_the_run(tmp_path, changes, said):
    assert load_table("mine", write(tmp_path)).note is None
    assert load_table("mine", write(tmp_path, note="what to know\n")).note == "what to know"
    with pytest.raises(UserError, match=said) as error:
        load_table("mine", write(tmp_path, **changes))
    assert "mine.yaml" in str(error.value)


def test_a_run_without_training_needs_no_other_run():
    plan = plan_of("zero-shot", Path("fixture"), fixture_videos=20)
    assert {run.verb for run in plan.runs.values()} == {"test"}
    assert all(not run.needs for run in plan.runs.values())
    # The fixture's own encoder stands for every backbone, so that a dataset is one run for all of them.
    assert len(plan.runs) == 3


def test_runs_of_a_figure_without_published_values_have_their_own_rows(tmp_path):
    runs = {name: {"config": ["method.yaml"], "shows": f"{name} frames"} for name in ("12", "15")}
    table = load_table("mine", write(tmp_path, table="Fig9", runs=runs))
    assert [(row.variant, row.direction) for row in table.rows] == [
        (f"{name} frames", direction) for name in ("12", "15") for direction in ("t2v", "v2t")
    ]
    assert all(row.printed(name) is None for row in table.rows for name in PRINTED)
    runs["15"]["shows"] = "12 frames"
    with pytest.raises(UserError, match="runs 12 and 15 have the same row 12 frames"):
        load_table("mine", write(tmp_path, table="Fig9", runs=runs))


def test_a_variant_of_a_published_row_follows_it(tmp_path):
    own = {"config": ["method.yaml"], "shows": "alone"}
    runs = {"printed": run(), "own": own, "below": run(shows="again")}
    table = load_table("mine", write(tmp_path, runs=runs))
    rows = table.rows
    found = {run.name: [row for row in rows if row.entry == run.entry] for run in table.runs}
    assert [row.direction for row in found["below"]] == [row.direction for row in found["printed"]] == ["t2v", "v2t"]
    for printed, below in zip(found["printed"], found["below"], strict=True):
        assert rows.index(below) == rows.index(printed) + 1
        assert (below.method, below.dataset, below.backbone) == (printed.method, printed.dataset, printed.backbone)
        assert below.variant == f"{printed.variant}, again"
        assert below.printed("R@1") is None
    assert list(rows[-2:]) == found["own"]
    runs["twice"] = runs["below"]
    with pytest.raises(UserError, match="runs below and twice have the same row again"):
        load_table("mine", write(tmp_path, runs=runs))


@pytest.mark.parametrize(("table", "name"), [("3", "both"), ("3", "none"), ("4", "neither"), ("5", "patches-mean")])
def test_mean_pooling_of_dpdv_averages_frames_and_patches(table, name):
    (settings,) = (each.settings for each in load_table(f"dpdv-{table}", RECIPES).runs if each.name == name)
    assert settings["model.init_args.dpdv.micro_interaction"] == "mean"
    assert settings["model.init_args.dpdv.patch_reduction.class_path"] == "AveragePatches"
