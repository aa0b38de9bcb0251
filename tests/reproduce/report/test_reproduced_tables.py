"""Tables made of run cards: measured values, differences, notes, and formats."""

import csv
import io
import math
import re
from dataclasses import asdict

import numpy as np
import pytest
import torch
from run_cards import RECIPES, keys_of, make_card, plan_of

from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.evaluator import LEAKS
from tvr_lightning.evaluation.weights import Weights
from tvr_lightning.reproduce.published import printed_figure, published_rows
from tvr_lightning.reproduce.report.site import Site
from tvr_lightning.reproduce.report.sources import compare_runs, measure, run_of_card, smallest_difference
from tvr_lightning.reproduce.report.table_view import (
    NOT_COMPARABLE,
    WARNINGS,
    comma_separated,
    latex,
    markdown,
    view_table,
    write_tables,
)
from tvr_lightning.reproduce.tables import load_table

pytestmark = pytest.mark.usefixtures("few_resamples")

QUALITIES = {"clip4clip": 1.0, "x-pool": 1.5, "baseline": 1.5, "gare": 3.0}


def view(tmp_path, qualities=QUALITIES, name="gare-1", fixture_videos=20, **setting):
    """A table of synthetic cards, and those cards by key."""
    plan, made = plan_of(name, tmp_path, fixture_videos=fixture_videos, **setting), {}
    for run, quality in qualities.items():
        for place, key in enumerate(keys_of(plan, f"{name}/{run}")):
            made[key] = make_card(plan.runs[key], tmp_path / "cards", quality + 0.3 * place)
    return viewed(name, made, tmp_path), made


def viewed(name, cards, tmp_path):
    runs = [run_of_card(card, tmp_path / "cards") for card in cards.values()]
    return view_table(load_table(name, RECIPES), runs)


def measured(table):
    """Rows of a table with a measured value."""
    return [row for row in csv.DictReader(io.StringIO(comma_separated(table))) if row["measured"]]


def hits(quality):
    """R@1 of each query of `make_card` in percent, from its scores in NumPy."""
    torch.manual_seed(0)
    scores = (torch.randn(60, 60) + quality * torch.eye(60)).numpy()
    return 100.0 * (scores.argmax(1) == np.arange(60))


def interval_in(text):
    """Numbers of a text such as `+1.0 [-1.0, +3.0]`."""
    return [float(number) for number in re.match(r"(\S+) \[(\S+), (\S+)\]", text).groups()]


def normal_interval(values):
    half = 1.96 * values.std() / len(values) ** 0.5
    return [values.mean(), values.mean() - half, values.mean() + half]


def metrics_of(card):
    return card.metrics("text_to_video") | {"SumR": card.results["sum_of_recalls"]}


def test_every_measured_value_is_that_of_a_card(tmp_path):
    table, cards = view(tmp_path)
    assert not [note for note in table.notes if note.startswith("Test set")]
    rows = measured(table)
    assert {row["run"] for row in rows} == set(QUALITIES)
    for row in rows:
        card = cards[row["cards"].removesuffix(".json")]
        direction = {"t2v": "text_to_video", "v2t": "video_to_text"}[row["direction"]]
        assert float(row["measured"]) == card.metrics(direction)[row["metric"]]
        assert float(row["low"]) <= float(row["measured"]) <= float(row["high"])
    shown = re.findall(r"\| (\d+\.\d) \[", markdown(table))
    assert len(shown) == len(rows)
    assert sorted(shown) == sorted(f"{float(row['measured']):.1f}" for row in rows)
    published = table.results[table.results["method"] == "HBI"]
    assert len(published)
    assert not published[["run", "measured"]].notna().any(axis=None), "published rows without a run"
    assert "| HBI" in markdown(table)
    for card in cards.values():
        card.results["protocol"] = "999 clips" if card.name == "gare-1/x-pool" else "1,000 clips"
    notes = viewed("gare-1", cards, tmp_path).notes
    assert "Test set of x-pool on MSR-VTT: 999 clips" in notes
    assert "Test set of clip4clip, baseline, gare on MSR-VTT: 1,000 clips" in notes


def test_only_runs_with_real_data_and_published_settings_are_compared_with_the_paper(tmp_path):
    table, cards = view(tmp_path, {"gare": 3.0}, fixture_videos=None)
    assert not table.caution
    row = next(row for row in measured(table) if (row["direction"], row["metric"]) == ("t2v", "R@1"))
    value = cards[row["cards"].removesuffix(".json")].metrics("text_to_video")["R@1"]
    assert float(row["difference"]) == pytest.approx(value - 49.1)
    found = table.results.set_index(["run", "direction", "metric"]).loc[("gare", "t2v", "R@1"), "difference_text"]
    assert found in markdown(table)
    assert interval_in(found) == pytest.approx([end - 49.1 for end in normal_interval(hits(3.0))], abs=2.5)
    (card,) = cards.values()
    card.results["warnings"] = [SYNTHETIC]
    assert viewed("gare-1", cards, tmp_path).caution == NOT_COMPARABLE
    table, _ = view(tmp_path)
    assert table.caution == NOT_COMPARABLE
    assert "difference |" not in markdown(table)
    assert not any(row["difference"] for row in measured(table))
    for name in ("short.yaml", "gare.yaml"):
        (tmp_path / name).write_text("trainer: {max_epochs: 1}\n")
        table, _ = view(tmp_path, {"gare": 3.0}, fixture_videos=None, overlay=tmp_path / name)
        assert f"{name}, not with the published settings" in table.caution
        assert "difference |" not in markdown(table)
        assert not table.results["difference"].notna().any()


LEAKING = {"audit": asdict(AuditResult(False, ["told the ground truth"], recall_with_help=100, recall_without_help=2))}
OVERRIDDEN = {"weights": asdict(Weights("last", overridden=["data.init_args.frames 2 (the checkpoint: 12)"]))}


@pytest.mark.parametrize(
    ("changes", "warnings", "note"),
    [
        (LEAKING, ["leaks"], "told the ground truth"),
        ({"warnings": [LEAKS]}, ["leaks"], ""),
        ({"audit": None}, ["not audited"], ""),
        ({"audit": asdict(AuditResult(False, problem="out of memory"))}, ["not audited"], ""),
        (OVERRIDDEN, ["overridden"], "frames 2 (the checkpoint: 12)"),
        (LEAKING | OVERRIDDEN | {"warnings": [SYNTHETIC]}, ["leaks", "overridden", "synthetic"], ""),
        ({}, [], ""),
    ],
)
def test_tables_and_the_leaderboard_show_and_explain_warnings(tmp_path, changes, warnings, note):
    _, cards = view(tmp_path, {"gare": 2.0}, fixture_videos=None)
    (card,) = cards.values()
    card.results |= changes
    made = viewed("gare-1", cards, tmp_path)
    row = measured(made)[0]
    assert row["warnings"] == ", ".join(warnings)
    shown = [mark for mark in warnings if mark != "synthetic"]  # which the title states once
    name = f"{row['method']} [{', '.join(shown)}]" if shown else row["method"]
    Site(tmp_path / "report", [made], [run_of_card(card, tmp_path / "cards")]).write()
    board = (tmp_path / "report" / "index.html").read_text()
    assert ("synthetic data" in board) is ("synthetic" in warnings)
    assert (f"<small>[{', '.join(shown)}]</small>" in board) is bool(shown)
    for text in (markdown(made), latex(made)):
        assert f"{name} |" in text or f"{name} &" in text
        assert ("Warnings: " in text) is bool(shown)
    for mark in shown:
        assert f"{mark}: {WARNINGS[mark]}" in markdown(made)
    assert any(note in each for each in [*made.notes, ""])


@pytest.mark.parametrize("share", ["nothing", "encoder", "features"])
def test_notes_state_what_the_runs_share(tmp_path, share):
    notes = " ".join(view(tmp_path, {"gare": 2.0}, share=share)[0].notes)
    assert ("starting from the same trained encoder: " in notes) is (share == "encoder")
    assert ("on the stored features of one frozen encoder: " in notes) is (share == "features")


def test_notes_name_failed_runs_and_inconsistencies_of_the_papers(tmp_path):
    plan = plan_of("gare-1", tmp_path, fixture_videos=20)
    (key,) = keys_of(plan, "gare-1/gare")
    failed = {"status": "failed", "results": None, "error": "exit status 1\nout of memory"}
    text = markdown(viewed("gare-1", {key: make_card(plan.runs[key], tmp_path / "cards", 2.0, **failed)}, tmp_path))
    assert "Run gare FAILED" in text
    assert "out of memory" in text
    assert "| gare-1/gare | failed |" in text
    table, _ = view(tmp_path, {}, name="tc-mgc-1a")
    assert any("SumR 393.2, but its recalls add up to 383.2" in note for note in table.notes)
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


def test_differences_from_the_baseline_are_paired_by_query(tmp_path):
    table, cards = view(tmp_path)
    said = next(line for line in table.statistics if line.startswith("gare against baseline"))
    runs = {card.name: card for card in cards.values()}
    pair = [[run_of_card(runs[f"gare-1/{name}"], tmp_path / "cards")] for name in ("baseline", "gare")]
    written = measured(table)
    for metric in ("R@1", "R@5", "R@10", "MdR", "MnR", "RSum", "SumR"):
        found = compare_runs(*pair, "text_to_video", metric)
        assert (found is None) == (metric == "MdR")
        first, second = (metrics_of(run.card)[metric] for (run,) in pair)
        assert measure(pair[0], "text_to_video", metric).mean == pytest.approx(first)
        if found is None:
            continue
        assert found.difference.estimate == pytest.approx(second - first)
        assert found.difference.low <= second - first <= found.difference.high
        assert found.p_value < 0.01
        for row in written:
            if (row["run"], row["direction"], row["metric"]) == ("gare", "t2v", metric):
                assert float(row["against_baseline"]) == pytest.approx(second - first)
                assert float(row["against_baseline_low"]) == found.difference.low
    expected = normal_interval(hits(3.0) - hits(1.5))
    assert interval_in(said.partition("R@1: ")[2]) == pytest.approx(expected, abs=2.5)
    assert said.endswith(", resolved")
    same, _ = view(tmp_path / "same", {"baseline": 1.5, "gare": 1.5})
    said = next(line for line in same.statistics if line.startswith("gare against baseline"))
    assert said.endswith("R@1: +0.0 [+0.0, +0.0] points, p 1 (Holm), paired over queries, not resolved")
    assert measure(pair[1], "text_to_video", "R@50") is None
    runs["gare-1/gare"].run["fingerprints"]["data"] = "of another dataset"
    pair = [[run_of_card(runs[f"gare-1/{name}"], tmp_path / "cards")] for name in ("baseline", "gare")]
    assert compare_runs(*pair, "text_to_video", "R@1") is None, "runs on other data are not compared"


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


def test_more_queries_resolve_smaller_differences():
    assert smallest_difference(48.0, 1000) == pytest.approx(4.4, abs=0.05)  # 1.96 sqrt(2 0.48 0.52 / 1000)
    assert smallest_difference(48.0, 4000) == pytest.approx(smallest_difference(48.0, 1000) / 2, rel=0.01)
    assert smallest_difference(0.0, 20) > 5


def test_tables_are_written_in_three_formats_and_latex_is_escaped(tmp_path):
    table, _ = view(tmp_path)
    paths = write_tables([table], tmp_path / "tables" / "gare-1")
    assert [path.name for path in paths] == ["gare-1.md", "gare-1.csv", "gare-1.tex"]
    table.notes.append("50 % of a_b & #1 \\ ~ ^ {x} $")
    text = latex(table)
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0]
    assert len({line.count(" & ") for line in body.strip().splitlines()}) == 1
    assert r"50 \% of a\_b \& \#1 \textbackslash \space \textasciitilde \space \textasciicircum \space \{x\} \$" in text
    assert not re.search(r"(?<!\\)[%_#]", text)


def test_the_sum_of_both_directions_is_compared_if_only_it_is_published(tmp_path):
    table, cards = view(tmp_path, {"exp3": 2.0, "exp10-sdr": 3.0}, name="tc-mgc-fig7")
    row = next(row for row in measured(table) if row["published"] == "408.0")
    card = cards[row["cards"].removesuffix(".json")]
    assert (row["metric"], float(row["measured"])) == ("SumR", card.results["sum_of_recalls"])
    assert [printed_figure(value) for value in (49.0, 8.25, 441.3)] == ["49.0", "8.25", "441.3"]
    (row,) = (row for row in published_rows() if row.mean_rank == 8.25)
    assert (row.paper, row.table) == ("GAID", "6")
