"""Tables as recipes: the shipped ones fit recipes and print, and wrong ones say what is wrong."""

from pathlib import Path

import pytest
import yaml

from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.published import PRINTED, published_rows
from tvr_lightning.reproduce.runs.plan import Setting, make_plan
from tvr_lightning.reproduce.tables import known_tables, load_table

RECIPES = Path(__file__).parent.parent.parent / "recipes"
FIRST_TABLES = {"gare-1", "tc-mgc-1a", "tc-mgc-1b", "ncl-1", "dpdv-1", "gaid-1"}


def write(folder: Path, **changes) -> Path:
    """A folder of recipes with one small table, changed."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    (folder / "method.yaml").write_text("data: {class_path: MSRVTT}\n")
    table = {
        "paper": "gare",
        "table": "1",
        "runs": {"x-pool": {"config": ["method.yaml"], "row": {"method": "X-Pool"}}},
    }
    (folder / "tables" / "mine.yaml").write_text(yaml.safe_dump(table | changes))
    return folder


def test_the_first_table_of_every_paper_is_there():
    assert set(known_tables(RECIPES)) >= FIRST_TABLES


@pytest.mark.parametrize("name", known_tables(RECIPES))
def test_shipped_tables_stand_for_printed_lines(name):
    table = load_table(name, RECIPES)
    printed = {row.entry for row in table.rows}
    assert {run.entry for run in table.runs} <= printed
    assert len({run.entry for run in table.runs}) == len(table.runs)
    if printed - {run.entry for run in table.runs}:
        assert table.note, "a note says why printed lines have no run"


def test_a_run_that_trains_nothing_evaluates_and_waits_for_none():
    table = load_table("zero-shot", RECIPES)
    plan = make_plan([table], Setting(RECIPES, Path("fixture"), fixture_videos=20))
    assert {run.verb for run in plan.runs.values()} == {"test"}
    assert all(not run.needs for run in plan.runs.values())
    # The fixture's own encoder stands for every backbone, so that a dataset is one run for all of them.
    assert len(plan.runs) == 3


@pytest.mark.parametrize("trains", [True, False, "no"])
def test_a_run_cannot_train_and_take_anothers_weights(trains, tmp_path):
    runs = {"a": {"config": ["method.yaml"], "row": {"method": "X-Pool"}, "trained_by": "b", "trains": trains}}
    with pytest.raises(UserError, match=r"run a: trains is .*; omit it, or set it to false without trained_by"):
        load_table("mine", write(tmp_path, runs=runs))


def test_lines_without_a_run_stay_in_the_table():
    table = load_table("gare-1", RECIPES)
    assert "HBI" in {row.method for row in table.rows}
    assert "HBI" not in {run.entry[5] for run in table.runs}


def test_an_unknown_table_lists_the_known_ones():
    with pytest.raises(UserError, match=r"no table 'gare-0'.*gare-1"):
        load_table("gare-0", RECIPES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runs": {"a": {"config": ["absent.yaml"], "row": {"method": "X-Pool"}}}}, "run a: there is no recipe"),
        ({"runs": {"a": {"config": ["method.yaml"], "row": {"method": "X-Pol"}}}}, "matches 0 published rows.*X-Pool"),
        ({"paper": "tc-mgc", "table": "1b"}, "matches 2 published rows.*ViT-B/16"),
        ({"runs": {"a": {"config": ["method.yaml"], "rows": {}}}}, "run a: missing or unknown rows;"),
        ({"runs": {"a": {"config": ["method.yaml"]}}}, r"run a: set row \(a published row\)"),
        ({"runs": ["a"]}, "runs must be a mapping; use {} if"),
        ({"baseline": "b"}, "baseline 'b' is not a run of this table. Available: x-pool"),
        ({"table": "99"}, "No published row has table '99'"),
        (
            {"runs": {"a": {"config": ["method.yaml"], "row": {"method": "X-Pool"}, "trained_by": "b"}}},
            "run a: trained_by 'b' is not a run of this table that trains",
        ),
        (
            {
                "runs": {
                    "a": {"config": ["method.yaml"], "row": {"method": "X-Pool"}},
                    "b": {"config": ["method.yaml"], "row": {"method": "X-Pool", "backbone": "ViT-B/32"}},
                }
            },
            "runs a and b have the same published row",
        ),
    ],
)
def test_a_wrong_table_names_file_run_and_fix(tmp_path, changes, said):
    with pytest.raises(UserError, match=said) as error:
        load_table("mine", write(tmp_path, **changes))
    assert "mine.yaml" in str(error.value)


def test_a_figure_without_printed_numbers_has_lines_of_its_own(tmp_path):
    runs = {name: {"config": ["method.yaml"], "shows": f"{name} frames"} for name in ("12", "15")}
    table = load_table("mine", write(tmp_path, table="Fig9", runs=runs))
    assert [(row.variant, row.direction) for row in table.rows] == [
        (f"{name} frames", direction) for name in ("12", "15") for direction in ("t2v", "v2t")
    ]
    assert all(row.printed(name) is None for row in table.rows for name in PRINTED)
    runs["15"]["shows"] = "12 frames"
    with pytest.raises(UserError, match="runs 12 and 15 have the same row 12 frames"):
        load_table("mine", write(tmp_path, table="Fig9", runs=runs))


def test_a_line_below_a_printed_one_shares_all_but_what_it_shows(tmp_path):
    run = {"config": ["method.yaml"], "row": {"method": "X-Pool"}}
    runs = {"printed": run, "own": {"config": ["method.yaml"], "shows": "alone"}, "below": run | {"shows": "again"}}
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


def test_a_table_carries_its_note(tmp_path):
    assert load_table("mine", write(tmp_path)).note is None
    assert load_table("mine", write(tmp_path, note="what to know\n")).note == "what to know"


@pytest.mark.parametrize("name", known_tables(RECIPES))
def test_leaking_numbers_are_set_against_runs_that_leak_or_the_note_says_so(name):
    table = load_table(name, RECIPES)
    methods = {"GAID", "GAID+DSL", "T-MASS", "T-Mass"}
    printed = {row.entry for row in table.rows if row.method in methods and row.recall_1 is not None}
    clean = [run for run in table.runs if run.entry in printed and not run.config[-1].stem.endswith("-as-released")]
    if clean:
        assert "leaks ground truth" in (table.note or ""), [run.name for run in clean]


def test_a_table_that_this_project_does_not_run_is_published_only():
    table = load_table("gare-10", RECIPES)
    assert table.runs == ()
    assert {row.method for row in table.rows} == {"CLIP4Clip vs GARE"}


def test_what_needs_another_architecture_is_printed_above_the_bases_that_there_are():
    table = load_table("ncl-4", RECIPES)
    assert {row.method for row in table.rows if row.recall_1 is not None} == {"SSB", "SSB + NCL"}
    assert {run.shows for run in table.runs if "ncl" in run.name} == {
        f"{base} with NCL on MSR-VTT 1k-A" for base in ("X-CLIP", "DRL", "X-Pool")
    }


@pytest.mark.parametrize(("table", "run"), [("3", "both"), ("3", "none"), ("4", "neither"), ("5", "patches-mean")])
def test_mean_pooling_of_dpdv_is_the_mean_over_frames_and_patches(table, run):
    recipe = next(each for each in load_table(f"dpdv-{table}", RECIPES).runs if each.name == run)
    assert recipe.settings["model.init_args.dpdv.micro_interaction"] == "mean"
    assert recipe.settings["model.init_args.dpdv.patch_reduction.class_path"] == "AveragePatches"


def test_every_published_table_has_a_recipe():
    numbers = {(row.paper.lower(), row.table) for row in published_rows()}
    have = {(table.paper, table.table) for table in (load_table(name, RECIPES) for name in known_tables(RECIPES))}
    assert numbers <= have
