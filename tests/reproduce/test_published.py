"""Published results: rows, recipes of tables, the command that shows them, and a comparison of released checkpoints.

The checkpoints are untrained stand-ins in the authors' layouts.
"""

import csv
import io
import json
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from parity.case import load_case
from run_cards import RECIPES, plan_of

from tvr_lightning.cli import main
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.errors import UserError
from tvr_lightning.reproduce import released
from tvr_lightning.reproduce.published import NOISE, PRINTED, close_to_best, published_rows, select_published
from tvr_lightning.reproduce.tables import known_tables, load_table


def test_rows_are_unique_and_plausible_with_readable_citations():
    rows = published_rows()
    assert {row.paper for row in rows} == {"GARE", "TC-MGC", "NCL", "DPDV", "GAID", "zero-shot"}
    assert len({(row.entry, row.direction) for row in rows}) == len(rows)
    assert len([row for row in rows if row.paper != "zero-shot"]) == 768
    for row in rows:
        recalls = [row.printed(name) for name in ("R@1", "R@5", "R@10", "R@50") if row.printed(name) is not None]
        assert recalls == sorted(recalls), row
        assert all(0 <= value <= 100 for value in recalls), row
        assert all(row.printed(name) is None or row.printed(name) >= 1 for name in ("MdR", "MnR")), row
        assert row.paper != "zero-shot" or "arXiv" in row.note or "github.com" in row.note
    citations = {"Luo et al., Neurocomputing 22", "CVPR 21", "r=0.3: linear-softmax, SDR"}
    assert citations <= {row.variant for row in rows}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (("gare", "1", "MSR-VTT", "GARE (Ours)", "t2v"), (49.1, 74.7, 83.6, 12.0, None)),
        (("ncl", "1", None, "NCL", "t2v"), (45.9, 76.8, None, 6.7, None)),
        (("zero-shot", None, "MSR-VTT", "PE-Core-B", "t2v"), (47.6, None, None, None, None)),
        (("zero-shot", None, "MSR-VTT", "PE-Core-B", "v2t"), (47.3, None, None, None, None)),
    ],
)
def test_values_equal_those_of_the_papers(query, expected):
    (row,) = select_published(*query)
    assert tuple(row.printed(name) for name in ("R@1", "R@5", "R@10", "MnR", "RSum")) == expected


def test_a_note_names_a_sum_that_contradicts_its_recalls():
    """By more than rounding half of the last printed digit, of every term and of the sum."""
    entries = {}
    for row in published_rows():
        entries.setdefault(row.entry, []).append(row)
    named = set()
    for both in entries.values():
        for row in both:
            for name, rows in (("RSum", [row]), ("SumR", both)):
                terms = [one.printed(f"R@{k}") for one in rows for k in (1, 5, 10)]
                terms = [term for term in terms if term is not None]
                value, count = row.printed(name), 3 if name == "RSum" else 6
                if value is not None and len(terms) == count and abs(sum(terms) - value) > 0.05 * (count + 1) + 1e-6:
                    said = f"the paper prints {name} {value:.1f}, but its recalls add up to {sum(terms):.1f}"
                    assert row.note == said
                    named.add((row.paper, row.table, row.method, row.backbone))
    assert named == {("TC-MGC", "1a", "CLIP4Clip-tightTransf", "ViT-B/16")}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"paper": "resnet"}, "DPDV, GAID, GARE, NCL, TC-MGC"),
        ({"paper": "gaid", "table": "12"}, "1, 2, 3"),
        ({"paper": "ncl", "dataset": "LSMDC"}, "ActivityNet"),
    ],
)
def test_an_unknown_value_is_refused_with_the_known_ones(query, said):
    with pytest.raises(UserError, match=said):
        select_published(**query)


def test_the_command_shows_rows_and_notes_in_all_formats(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def shown(*options):
        assert main(["published", "--paper=gare", "--table=4", *options]) == 0
        return capsys.readouterr().out

    text = shown()
    assert all(part in text for part in ("C=V_frame", "49.1", "inconsistent in the paper"))
    assert len(list(csv.DictReader(io.StringIO(shown("--format=csv"))))) == 6
    assert json.loads(shown("--format=json"))[0]["recall_1"] == 47.4
    assert main(["published", "--paper=gare", "--table=1"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "T2VLA" in line and "t2v" in line)
    assert row.split()[-2:] == ["4.0", "-"], "a column with some values is shown"
    found = {row.method for row in select_published(method="gare")}
    assert "GARE (Ours)" in found
    assert all("gare" in method.lower() for method in found)


def test_rows_that_the_test_set_does_not_distinguish_from_the_best_are_marked():
    rows = [row for row in select_published("gare", "1") if row.backbone == "ViT-B/32" and row.direction == "t2v"]
    best = max(row.recall_1 for row in rows)
    marked = {row.method for row, close in zip(rows, close_to_best(rows), strict=True) if close}
    assert marked == {row.method for row in rows if best > row.recall_1 > best - NOISE}
    assert {"CLIP4Clip", "GARE (Ours)"}.isdisjoint(marked)
    assert not any(close_to_best(select_published(dataset="MSVD"))), "no difference was measured on so few videos"


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


def test_a_difference_from_the_published_result_ends_with_status_1(parity_cases, root, tmp_path, monkeypatch, capsys):
    generator = torch.Generator().manual_seed(0)
    for name, case in {"clip4clip": "clip4clip_seqTransf", "gare": "gare", "xpool": "tcmgc"}.items():
        checkpoint = dict(load_case(parity_cases / f"{case}.safetensors").checkpoint)
        width = checkpoint["clip.token_embedding.weight"].shape[1]
        # With the rows that real captions need.
        checkpoint["clip.token_embedding.weight"] = 0.02 * torch.randn(49408, width, generator=generator)
        torch.save(checkpoint, tmp_path / f"{name}.bin")
    monkeypatch.setenv("TVR_DATA", str(root))
    monkeypatch.setattr(released, "measure", cache(released.measure))

    def verify(*options):
        status = main(["verify-released", str(tmp_path), "--num_workers=0", *options])
        return status, capsys.readouterr().out

    status, printed = verify()
    assert status == 1
    assert "More than 0.3 R@1 from the published result: clip4clip, gare" in printed
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    cells = {(row[0], row[2]): row for row in rows[2:]}
    assert {name for name, direction in cells if direction == "t2v"} == set(released.RELEASED)
    # GARE, Table 1
    published = {("clip4clip", "t2v"): 44.5, ("clip4clip", "v2t"): 42.7, ("gare", "t2v"): 49.1, ("gare", "v2t"): 48.6}
    assert {key: float(cells[key][3]) for key in published} == published
    assert len(rows) == 2 + len(cells)
    assert cells["gare", "t2v"][1] == "gare, Table 1"
    for (name, direction), (*_, expected, measured, difference, remark) in cells.items():
        if name in ("clip4clip", "gare"):
            evaluation = released.measure(name, tmp_path / f"{name}.bin", 0).evaluation
            metrics = {"t2v": evaluation.text_to_video, "v2t": evaluation.video_to_text}[direction]
            assert measured == f"{metrics['R@1']:.1f}"
            assert float(measured) - float(expected) == pytest.approx(float(difference), abs=0.11)
            assert remark == f"{SYNTHETIC}; not audited"
        else:
            assert measured == "not measured"
            assert remark == "no checkpoint" or "is a checkpoint of TC-MGC, not of" in remark
    assert verify("--tolerance=100")[0] == 1  # because of xpool.bin
    (tmp_path / "xpool.bin").unlink()
    assert verify("--tolerance=100")[0] == 0
    (tmp_path / "gare.bin").unlink()
    assert verify()[0] == 1, "one result that differs is enough"


def test_missing_data_and_missing_checkpoints_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TVR_DATA", raising=False)
    assert main(["verify-released", str(tmp_path)]) == 2
    assert "Set TVR_DATA to their parent folder." in capsys.readouterr().err
    monkeypatch.setenv("TVR_DATA", str(tmp_path))
    assert main(["verify-released", str(tmp_path)]) == 2
    assert f"{tmp_path} contains no checkpoint. Expected the authors' files" in capsys.readouterr().err
