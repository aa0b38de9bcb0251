"""Tables from cards: every measured number is a card's, and what cannot be compared is not."""

import csv
import io
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from run_cards import keys_of, make_card

from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.evaluator import LEAKS
from tvr_lightning.evaluation.weights import Weights
from tvr_lightning.reproduce.published import printed_figure, published_rows
from tvr_lightning.reproduce.report.site import Site
from tvr_lightning.reproduce.report.sources import run_of_card
from tvr_lightning.reproduce.report.table_view import (
    NOT_COMPARABLE,
    WARNINGS,
    comma_separated,
    latex,
    markdown,
    view_table,
    write_tables,
)
from tvr_lightning.reproduce.report.uncertainty import compare_runs, measure, smallest_difference
from tvr_lightning.reproduce.runs.plan import Setting, make_plan
from tvr_lightning.reproduce.tables import load_table

RECIPES = Path(__file__).parents[3] / "recipes"
QUALITIES = {"clip4clip": 1.0, "x-pool": 1.5, "baseline": 1.5, "gare": 3.0}


def view(tmp_path, qualities=QUALITIES, name="gare-1", **changes):
    """A table of made-up cards, and those cards by run."""
    setting = replace(Setting(RECIPES, tmp_path, fixture_videos=20), **changes)
    table, folder = load_table(name, RECIPES), tmp_path / "cards"
    plan = make_plan([table], setting)
    made = {}
    for run, quality in qualities.items():
        for place, key in enumerate(keys_of(plan, f"{name}/{run}")):
            made[key] = make_card(plan.runs[key], folder, quality + 0.3 * place)
    return viewed(table, made, folder), made


def viewed(table, cards, folder):
    return view_table(table, [run_of_card(card, folder) for card in cards.values()])


def test_every_measured_number_is_found_in_a_card(tmp_path):
    table, cards = view(tmp_path)
    rows = [row for row in csv.DictReader(io.StringIO(comma_separated(table))) if row["measured"]]
    assert {row["run"] for row in rows} == set(QUALITIES)
    for row in rows:
        card = cards[row["cards"].removesuffix(".json")]
        direction = {"t2v": "text_to_video", "v2t": "video_to_text"}[row["direction"]]
        assert float(row["measured"]) == card.metrics(direction)[row["metric"]]
        assert float(row["low"]) <= float(row["measured"]) <= float(row["high"])
    shown = re.findall(r"\| (\d+\.\d) \[", markdown(table))
    assert len(shown) == len(rows)
    assert sorted(shown) == sorted(f"{float(row['measured']):.1f}" for row in rows)


def test_a_note_names_the_test_sets_if_runs_rank_different_ones(tmp_path):
    plan = make_plan([table := load_table("gare-1", RECIPES)], Setting(RECIPES, tmp_path, fixture_videos=20))
    cards = {}
    for run, protocol in (("clip4clip", "1,000 clips"), ("x-pool", "999 clips"), ("gare", "1,000 clips")):
        for key in keys_of(plan, f"gare-1/{run}"):
            cards[key] = make_card(plan.runs[key], tmp_path / "cards", 1.0)
            cards[key].results["protocol"] = protocol
    notes = viewed(table, cards, tmp_path / "cards").notes
    assert "Test set of x-pool on MSR-VTT: 999 clips" in notes
    assert "Test set of clip4clip, gare on MSR-VTT: 1,000 clips" in notes
    assert not [note for note in view(tmp_path)[0].notes if note.startswith("Test set")]


def test_printed_lines_without_a_run_are_published_only(tmp_path):
    table, _ = view(tmp_path)
    rows = table.results[table.results["method"] == "HBI"]
    assert len(rows)
    assert not rows[["run", "measured"]].notna().any(axis=None)
    assert "| HBI" in markdown(table)


def test_synthetic_numbers_are_never_set_against_published_ones(tmp_path):
    table, _ = view(tmp_path)
    assert table.caution == NOT_COMPARABLE
    assert "difference |" not in markdown(table)
    assert all(not row["difference"] for row in csv.DictReader(io.StringIO(comma_separated(table))))


def test_runs_of_datasets_that_are_marked_as_synthetic_are_not_either(tmp_path):
    setting = Setting(RECIPES, tmp_path)
    table = load_table("gare-1", RECIPES)
    plan = make_plan([table], setting)
    (key,) = keys_of(plan, "gare-1/gare")
    card = make_card(plan.runs[key], tmp_path, 2.0)
    card.results["warnings"] = [SYNTHETIC]
    made = viewed(table, {key: card}, tmp_path)
    assert made.caution == NOT_COMPARABLE


LEAKING = {"audit": asdict(AuditResult(False, ["told the ground truth"], recall_with_help=100, recall_without_help=2))}
MARKED = {
    "leaks": LEAKING,
    "leaks as released": {"warnings": [LEAKS]},
    "not audited": {"audit": None},
    "audit stopped": {"audit": asdict(AuditResult(False, problem="out of memory"))},
    "overridden": {"weights": asdict(Weights("last", overridden=["data.init_args.frames 2 (the checkpoint: 12)"]))},
    "all": LEAKING | {"weights": asdict(Weights("last", overridden=["frames"])), "warnings": [SYNTHETIC]},
    "none": {},
}


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        ("leaks", ["leaks"]),
        ("leaks as released", ["leaks"]),
        ("not audited", ["not audited"]),
        ("audit stopped", ["not audited"]),
        ("overridden", ["overridden"]),
        ("all", ["leaks", "overridden", "synthetic"]),
        ("none", []),
    ],
)
def test_every_table_and_the_leaderboard_mark_a_run_and_explain_the_warnings(tmp_path, changes, warnings):
    table = load_table("gare-1", RECIPES)
    plan = make_plan([table], Setting(RECIPES, tmp_path))
    (key,) = keys_of(plan, "gare-1/gare")
    card = make_card(plan.runs[key], tmp_path, 2.0)
    card.results |= MARKED[changes]
    made = viewed(table, {key: card}, tmp_path)
    row = next(row for row in csv.DictReader(io.StringIO(comma_separated(made))) if row["measured"])
    assert row["warnings"] == ", ".join(warnings)
    shown = [mark for mark in warnings if mark != "synthetic"]  # which the title states once
    name = f"{row['method']} [{', '.join(shown)}]" if shown else row["method"]
    Site(tmp_path / "report", [made], [run_of_card(card, tmp_path)]).write()
    board = (tmp_path / "report" / "index.html").read_text()
    assert ("synthetic data" in board) is ("synthetic" in warnings)
    assert (f"<small>[{', '.join(shown)}]</small>" in board) is bool(shown)
    for text in (markdown(made), latex(made)):
        assert f"{name} |" in text or f"{name} &" in text
        assert ("Warnings: " in text) is bool(shown)
    warnings = shown
    for mark in warnings:
        assert f"{mark}: {WARNINGS[mark]}" in markdown(made)
    if "leaks" in warnings and changes != "leaks as released":
        assert any("told the ground truth" in note for note in made.notes)
    if changes == "overridden":
        assert any("frames 2 (the checkpoint: 12)" in note for note in made.notes)


def test_real_numbers_are(tmp_path):
    table, cards = view(tmp_path, fixture_videos=None)
    assert not table.caution
    row = next(
        row
        for row in csv.DictReader(io.StringIO(comma_separated(table)))
        if (row["run"], row["direction"], row["metric"]) == ("gare", "t2v", "R@1")
    )
    measured = cards[row["cards"].removesuffix(".json")].metrics("text_to_video")["R@1"]
    assert float(row["difference"]) == pytest.approx(measured - 49.1)
    assert f"{measured - 49.1:+.1f} [" in markdown(table)


def test_an_overlay_on_real_data_is_named_and_not_compared(tmp_path):
    overlay = tmp_path / "short.yaml"
    overlay.write_text("trainer: {max_epochs: 1}\n")
    table, _ = view(tmp_path, fixture_videos=None, overlay=overlay)
    assert "short.yaml, not with the published settings" in table.caution
    assert "difference |" not in markdown(table)


def test_a_failed_run_is_a_note_and_not_a_lost_table(tmp_path):
    setting = Setting(RECIPES, tmp_path, fixture_videos=20)
    table = load_table("gare-1", RECIPES)
    plan = make_plan([table], setting)
    (key,) = keys_of(plan, "gare-1/gare")
    card = make_card(plan.runs[key], tmp_path, 2.0, status="failed", results=None, error="exit status 1\nout of memory")
    text = markdown(viewed(table, {key: card}, tmp_path))
    assert "Run gare FAILED" in text
    assert "out of memory" in text
    assert "| gare-1/gare | - | failed |" in text


def test_notes_of_the_print_and_sums_that_do_not_fit_are_shown(tmp_path):
    table, _ = view(tmp_path, {}, name="tc-mgc-1a")
    assert any("SumR 393.2, but its recalls add up to 383.2" in note for note in table.notes)


def test_the_tables_own_note_is_the_first(tmp_path):
    table, _ = view(tmp_path, {}, name="gaid-1")
    assert table.notes[0].startswith("Rows without a run are methods that this project does not have")
    assert f"- {table.notes[0]}" in markdown(table)


def test_seeds_give_mean_and_deviation(tmp_path):
    table, cards = view(tmp_path, {"gare": 1.0}, seeds=(0, 1, 2))
    rows = table.results[(table.results["run"] == "gare") & (table.results["metric"] == "R@1")]
    found = rows[rows["direction"] == "t2v"].iloc[0]
    values = [card.metrics("text_to_video")["R@1"] for card in cards.values()]
    mean = sum(values) / 3
    assert found.seeds == 3
    assert found.measured == pytest.approx(mean)
    assert found.deviation == pytest.approx(math.sqrt(sum((value - mean) ** 2 for value in values) / 2))
    assert found.low <= mean <= found.high
    assert f"{mean:.1f} ± {found.deviation:.1f} [" in markdown(table)


def test_differences_to_the_baseline_are_paired_over_queries(tmp_path):
    table, cards = view(tmp_path)
    said = next(line for line in table.statistics if line.startswith("gare against baseline"))
    runs = {card.name: card for card in cards.values()}
    pair = [[run_of_card(runs[f"gare-1/{name}"], tmp_path / "cards")] for name in ("baseline", "gare")]
    written = list(csv.DictReader(io.StringIO(comma_separated(table))))
    for metric in ("R@1", "R@5", "R@10", "MdR", "MnR", "RSum", "SumR"):
        found = compare_runs(*pair, "text_to_video", metric)
        first, second = (
            run.results["sum_of_recalls"] if metric == "SumR" else run.card.metrics("text_to_video")[metric]
            for (run,) in pair
        )
        assert found.difference.estimate == pytest.approx(second - first)
        assert found.difference.low <= second - first <= found.difference.high
        assert math.isnan(found.p_value) if metric == "MdR" else found.p_value < 0.01
        for row in written:
            if (row["run"], row["direction"], row["metric"]) == ("gare", "t2v", metric):
                assert float(row["against_baseline"]) == pytest.approx(second - first)
                assert float(row["against_baseline_low"]) == found.difference.low
    r1 = [runs[f"gare-1/{name}"].metrics("text_to_video")["R@1"] for name in ("baseline", "gare")]
    assert f"{r1[1] - r1[0]:+.1f} [" in said
    assert "resolved" in said


def test_every_run_is_compared_with_the_baseline_of_its_dataset_and_backbone(tmp_path):
    table, _ = view(tmp_path, dict.fromkeys(("t-mass", "gaid", "t-mass-didemo", "x-pool-didemo"), 1.0), name="gaid-1")
    rows = table.results[table.results["measured"].notna()]
    found = {name: own["baseline"].dropna().max() for name, own in rows.groupby("run")}
    found = {name: None if baseline != baseline else baseline for name, baseline in found.items()}
    baselines = {f"t-mass{where}": None for where in ("", "-b16", "-didemo", "-didemo-b16")}
    assert found == baselines | {
        "gaid": "t-mass", "gaid-b16": "t-mass-b16",  # the fixture has one encoder for both
        "x-pool-didemo": "t-mass-didemo", "x-pool-didemo-b16": "t-mass-didemo-b16",
    }  # fmt: skip
    said = {line.partition(",")[0] for line in table.statistics if " against " in line}
    assert said == {f"{run} against {baseline}" for run, baseline in found.items() if baseline}


def test_runs_on_other_data_are_not_compared(tmp_path):
    _, cards = view(tmp_path)
    first, second = (
        next(card for card in cards.values() if card.name.endswith(name)) for name in ("/baseline", "/gare")
    )
    second.run["fingerprints"]["data"] = "of another dataset"
    pair = [[run_of_card(card, tmp_path / "cards")] for card in (first, second)]
    assert compare_runs(*pair, "text_to_video", "R@1") is None


@pytest.mark.parametrize("metric", ["R@1", "R@5", "R@10", "MdR", "MnR", "RSum", "SumR"])
def test_every_metric_has_an_interval_around_it(tmp_path, metric):
    _, cards = view(tmp_path, {"gare": 2.0})
    (card,) = cards.values()
    run = run_of_card(card, tmp_path / "cards")
    found = measure([run], "text_to_video", metric)
    own = card.results["sum_of_recalls"] if metric == "SumR" else card.metrics("text_to_video")[metric]
    assert found.mean == pytest.approx(own)
    assert found.interval.low <= own <= found.interval.high
    assert found.interval.low < found.interval.high
    assert measure([run], "text_to_video", "R@50") is None


def test_more_queries_resolve_smaller_differences_and_few_hits_do_not_look_certain():
    assert smallest_difference(48.0, 1000) == pytest.approx(4.4, abs=0.05)  # 1.96 sqrt(2 0.48 0.52 / 1000)
    assert smallest_difference(48.0, 4000) == pytest.approx(smallest_difference(48.0, 1000) / 2, rel=0.01)
    assert smallest_difference(0.0, 20) > 5


def test_figures_keep_the_digits_of_the_print():
    assert [printed_figure(value) for value in (49.0, 8.25, 441.3)] == ["49.0", "8.25", "441.3"]
    (row,) = (row for row in published_rows() if row.mean_rank == 8.25)
    assert (row.paper, row.table) == ("GAID", "6")


def test_all_three_formats_are_written_and_latex_is_escaped(tmp_path):
    table, _ = view(tmp_path)
    paths = write_tables([table], tmp_path / "tables" / "gare-1")
    assert [path.name for path in paths] == ["gare-1.md", "gare-1.csv", "gare-1.tex"]
    table.notes.append("50 % of a_b & #1 \\ ~ ^ {x} $")
    text = latex(table)
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0]
    assert len({line.count(" & ") for line in body.strip().splitlines()}) == 1
    assert r"50 \% of a\_b \& \#1 \textbackslash \space \textasciitilde \space \textasciicircum \space \{x\} \$" in text
    assert not re.search(r"(?<!\\)[%_#]", text)


def test_sums_over_both_directions_are_measured_where_only_they_are_printed(tmp_path):
    table, cards = view(tmp_path, {"exp3": 2.0, "exp10-sdr": 3.0}, name="tc-mgc-fig7")
    rows = [row for row in csv.DictReader(io.StringIO(comma_separated(table))) if row["measured"]]
    printed = next(row for row in rows if row["published"] == "408.0")
    card = cards[printed["cards"].removesuffix(".json")]
    assert (printed["metric"], float(printed["measured"])) == ("SumR", card.results["sum_of_recalls"])
