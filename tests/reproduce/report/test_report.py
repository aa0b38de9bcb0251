"""The pages of the report: values, links, images, and errors for bad folders; and the report of a real run.

The figures of a real run need its weights only once.
"""

import csv
import json
import re
import shutil
import signal
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from metric_rows import summarize
from run_cards import RECIPES, keys_of, make_answers, make_card, plan_of

from tvr_lightning.cli import main
from tvr_lightning.cli.tables import report as run_report
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.data.records import Split, TextRecord, VideoRecord
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.external_scores import evaluate_scores
from tvr_lightning.evaluation.results import results_of, write_results
from tvr_lightning.files import file_lock
from tvr_lightning.metrics import RetrievalRecall
from tvr_lightning.ranks import text_to_video_ranks
from tvr_lightning.reproduce.profile.costs import Costs, ProfileCard, read_profiles
from tvr_lightning.reproduce.published import PRINTED, printed_figure, published_rows
from tvr_lightning.reproduce.report import sources
from tvr_lightning.reproduce.report.figures.encoded_split import encode_run
from tvr_lightning.reproduce.report.figures.figure_types import figures_of
from tvr_lightning.reproduce.report.figures.gare import draw_course
from tvr_lightning.reproduce.report.figures.retrieval_examples import comparisons, measure_sheet
from tvr_lightning.reproduce.report.site import views_of
from tvr_lightning.reproduce.report.sources import (
    compare_runs,
    measure,
    read_curves,
    read_ranks,
    read_runs,
    run_of_card,
)
from tvr_lightning.reproduce.runs.card import write_record
from tvr_lightning.reproduce.runs.runner import run_plan
from tvr_lightning.runs.closing import write_query_ranks

pytestmark = pytest.mark.usefixtures("few_resamples")


class Page(HTMLParser):
    """Tags with their attributes, and the texts of table cells by row."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.rows, self.cell = [], [], False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self.cell:
            self.rows[-1][-1] += data


def page_of(folder, run):
    return (folder / "report" / "runs" / f"{run.key}.html").read_text(encoding="utf-8")


def write_cards(folder, qualities, **setting):
    plan = plan_of("gare-1", folder, seeds=(0, 1), **setting)
    for name, quality in qualities.items():
        for place, key in enumerate(keys_of(plan, f"gare-1/{name}")):
            make_card(plan.runs[key], folder / "cards", quality + place)
    return plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Report of three rows of a table with two seeds, a failed run, a run of questions, and a profile; read-only."""
    folder = tmp_path_factory.mktemp("report")
    plan = write_cards(folder, {"clip4clip": 1.0, "baseline": 1.5, "gare": 3.0}, fixture_videos=20)
    key = keys_of(plan, "gare-1/x-pool")[0]
    make_card(plan.runs[key], folder / "cards", 1.0, status="failed", results=None, error="out of <memory>")
    answers = plan_of("dpdv-s4", folder, fixture_videos=20)
    make_answers(next(iter(answers.runs.values())), folder / "cards", 19)
    stages = ("encode_text", "encode_video", "text_layers", "video_layers", "score", "training_step")
    costs = Costs(92_620_000, 1, 10.0, 2.0, 1.0, 3.0, 700.0, 900.0, dict.fromkeys(stages, 16_000_000_000))
    profile = ProfileCard("gare", "GARE", "ClipEncoder", {}, 16, 1000, 3, "32-true", costs, {"device": "cpu"})
    write_record(profile, folder / "profiles" / "gare.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "RESAMPLES", 100)
        run_report(folder, RECIPES, tables_only=True)
    return folder


@pytest.fixture(scope="module")
def report(folder):
    return folder / "report"


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_all_linked_pages_and_images_exist(report):
    pages = sorted(report.rglob("*.html"))
    assert len(pages) == 1 + 2 + 8 + 1  # overview, tables, runs, costs
    linked = {report / "index.html"}
    for path in pages:
        for tag, attrs in Page(path).tags:
            assert tag != "img" or attrs["alt"]
            target = attrs.get("href") or attrs.get("src")
            if target and not target.startswith("#"):
                assert not re.match(r"[a-z]+:|/", target), (path, target)
                assert (path.parent / target).is_file(), (path, target)
                linked.add((path.parent / target).resolve())
    assert set(pages) <= linked


def test_the_leaderboard_shows_the_values_of_the_cards_in_descending_order(folder, report):
    values = {}
    for run in read_runs(folder):
        if run.finished and not run.card.accuracy():
            values.setdefault(run.claims[0], []).append(run.card.metrics("text_to_video")["R@1"])
    means = sorted((sum(own) / len(own) for own in values.values()), reverse=True)
    rows = [row for row in Page(report / "index.html").rows if len(row) > 5 and "±" in row[1]]
    assert [row[1].split()[0] for row in rows] == [f"{mean:.1f}" for mean in means]
    assert rows[0][0] == "GARE"
    text = (report / "index.html").read_text()
    assert text.count("synthetic") == 1  # once at the top
    assert "49.1" not in text, "published results are not shown next to synthetic ones"


@pytest.mark.parametrize("synthetic", [True, False])
def test_every_decimal_number_in_a_table_is_measured_or_published(synthetic, folder, tmp_path):
    if not synthetic:  # differences from published values are shown
        folder = tmp_path
        write_cards(folder, {"baseline": 1.5, "gare": 3.0})
        run_report(folder, RECIPES, tables_only=True)
    runs = read_runs(folder)
    allowed = {str(run.card.seconds) for run in runs} | {str(run.card.peak_memory_mib) for run in runs}
    published = [row.printed(metric) for row in published_rows() for metric in PRINTED]
    allowed |= {printed_figure(value) for value in published if value is not None}
    differences = set()
    for claim in {claim for run in runs for claim in run.claims}:
        own = [run for run in runs if claim in run.claims and run.finished]
        answers = own and own[0].card.accuracy() is not None
        for direction in ("text_to_video",) if answers else ("text_to_video", "video_to_text"):
            for metric in ("accuracy",) if answers else PRINTED:
                found = measure(own, direction, metric)
                if found is None:
                    continue
                ends = (found.interval.low, found.interval.high) if found.interval else ()
                allowed |= {f"{value:.1f}" for value in (found.mean, found.deviation, *ends) if value is not None}
                differences |= {
                    f"{value - printed:+.1f}" for value in (found.mean, *ends) for printed in set(published) - {None}
                }
    seen = set()
    for path in [folder / "report" / "index.html", *(folder / "report" / "tables").glob("*.html")]:
        for row in Page(path).rows:
            for text in row:
                seen |= set(re.findall(r"(?<![\w/.])[-+]?\d[\d,]*\.\d+", text))
    signed = {number for number in seen if number[0] in "+-"}
    assert len(seen) > 30
    assert bool(signed) != synthetic
    assert seen - signed <= allowed
    assert signed <= differences


def test_pages_show_statistics_notes_commands_and_recipes(folder, report):
    text = (report / "tables" / "gare-1.html").read_text()
    view = views_of(read_runs(folder), RECIPES)[1]
    assert view.statistics
    for sentence in view.statistics:
        assert sentence in text
    assert "out of &lt;memory&gt;" in text
    assert "<memory>" not in text
    assert [row[0] for row in Page(report / "tables" / "gare-1.html").rows].count("gare-1/gare") == 2
    run = next(run for run in read_runs(folder) if run.card.name == "gare-1/gare")
    text = page_of(folder, run)
    assert "tvr reproduce gare-1 --only gare --seeds 0 --fixture" in text
    assert "seed_everything" in text
    assert "<script>" not in text
    assert "47.5" in {text.split(" ")[0] for row in Page(report / "tables" / "dpdv-s4.html").rows for text in row}
    rows = list(csv.DictReader((report / "report.csv").read_text(encoding="utf-8").splitlines()))
    measured = {row["run"] for row in rows if row["measured"] and row["metric"] == "R@1"}
    assert measured == {"clip4clip", "baseline", "gare"}
    assert len({row["title"] for row in rows}) == 2
    assert "## GARE, Table 1" in (report / "report.md").read_text(encoding="utf-8")
    assert r"\toprule" in (report / "report.tex").read_text(encoding="utf-8")


def test_profiles_are_compared_with_the_published_costs(report, copied):
    rows = Page(report / "costs.html").rows
    assert any("Total 11,905.05" in row[2] and row[3] == "92.62" for row in rows if len(row) > 3)
    # 3 stages of 16 G for 16 items each and the scores of 16 x 16 pairs
    assert any(row[5:7] == ["4.06", "16.00"] for row in rows if len(row) > 6)
    shutil.rmtree(copied / "report")
    (copied / "profiles" / "gare.json").unlink()
    run_report(copied, RECIPES, tables_only=True)
    assert "costs.html" not in (copied / "report" / "index.html").read_text()


def test_a_run_that_several_tables_share_is_in_all_of_them(tmp_path):
    plan = plan_of("gaid-1", tmp_path, ["x-pool"], fixture_videos=20)
    (run,) = plan.runs.values()
    make_card(replace(run, claims=["gaid-1/x-pool"]), tmp_path / "cards", 1.0)
    later = plan_of("gaid-1", tmp_path, ["x-pool", "x-pool-b16"], fixture_videos=20)
    run_plan(later, tmp_path, lambda line: None)
    (run,) = read_runs(tmp_path)
    assert run.claims == ["gaid-1/x-pool", "gaid-1/x-pool-b16"]
    (view,) = views_of([run], RECIPES)
    assert set(view.results.dropna(subset=["measured"])["backbone"]) == {"ViT-B/32", "ViT-B/16"}


def test_bad_folders_and_files_are_named(copied, tmp_path_factory, capsys):
    run_report(copied, RECIPES)
    assert "No figures of dpdv-s4/dpdv-vqa: figures need weights" in capsys.readouterr().out
    run = next(run for run in read_runs(copied) if run.finished)
    assert "No figures: figures need weights" in page_of(copied, run)
    (copied / "figures").mkdir(exist_ok=True)
    (copied / "figures" / f"{run.key}.npz").write_bytes(b"PK half a file")
    with pytest.raises(UserError, match="damaged"):
        figures_of(run, copied / "figures")
    (copied / "profiles" / "gare.json").write_text('{"schema": 99}')
    with pytest.raises(UserError, match="schema 99"):
        read_profiles(copied / "profiles")
    with pytest.raises(UserError, match=r"no run cards and no results.json"):
        read_runs(tmp_path_factory.mktemp("empty"))
    with pytest.raises(UserError, match=r"tables that are missing in .*: gare-1"):
        views_of([run for run in read_runs(copied) if "gare" in run.claims[0]], copied)
    card = next((copied / "cards").glob("*.json"))
    another = card.with_name("another.json")
    another.write_text(json.dumps(json.loads(card.read_text()) | {"key": "another"}))
    shutil.copy(card.with_suffix(".parquet"), another.with_suffix(".parquet"))
    with pytest.raises(UserError, match="are both cards of the run"):
        read_runs(copied)


@pytest.fixture
def run(finished):
    (run,) = read_runs(finished)
    return run


def test_a_run_is_rebuilt_with_its_weights(run):
    encoded = encode_run(run)
    ranks = text_to_video_ranks(encoded.similarity, encoded.matching)
    assert summarize(ranks, (1, 5, 10)) == pytest.approx(run.card.metrics("text_to_video"))
    stored, _ = read_ranks(run, "text_to_video")
    assert {float(rank) for rank in measure_sheet(encoded)["rank"]} <= set(stored.expected().tolist())
    curves = read_curves(run)
    assert curves["train/loss"].index.tolist() == list(range(run.card.steps))
    assert curves["val/t2v_R@1"].iloc[-1] == pytest.approx(run.card.metrics("text_to_video")["R@1"])


def folder_of_scores(folder, scores, recall=(1, 5, 10)):
    """Write the files of a run that scored texts (N) against as many videos, in the same order, and read it."""
    queries = len(scores)
    videos = [VideoRecord(f"v{index}", Path()) for index in range(queries)]
    split = Split("test", "pairs", videos, [TextRecord(f"text {index}", index) for index in range(queries)])
    truth = GroundTruth(torch.arange(queries), queries, "Toy", "test", "pairs")
    evaluation, _ = evaluate_scores(torch.from_numpy(scores), truth, recall=recall, more=[RetrievalRecall(60)])
    options = {"select_on": None, "checkpoint": None, "skipped": [], "config": {}, "precision": "", "seed": None}
    write_results(results_of(evaluation, method="Toy", **options), folder)
    write_query_ranks(folder, evaluation, split, truth.video_of_text)
    return read_runs(folder)[0], evaluation


def tied_values(scores, metric):
    """Value of each query (N,) in NumPy: the mean over the places of its match among equal scores."""
    recall = {"R@1": 1, "R@5": 5}.get(metric)
    found = []
    for query, row in enumerate(scores):
        first, tied = 1 + (row > row[query]).sum(), (row == row[query]).sum()
        ranks = np.arange(first, first + tied)
        found.append(ranks.mean() if recall is None else 100.0 * (ranks <= recall).mean())
    return np.array(found)


def test_ties_count_equally_in_results_stored_ranks_and_intervals(tmp_path):
    run, _ = folder_of_scores(tmp_path / "constant", np.ones((3, 3)))
    found = measure([run], "text_to_video", "R@1")
    assert (found.mean, found.interval.estimate) == pytest.approx((100 / 3, 100 / 3))
    random = np.random.default_rng(0)
    scores = random.integers(0, 4, (80, 80)) + 2.0 * np.eye(80)
    run, evaluation = folder_of_scores(tmp_path / "tied", scores)
    external, stored = evaluation.intervals, measure([run], "text_to_video", "SumR").interval
    assert external["both directions"]["SumR"] == {"low": stored.low, "high": stored.high}
    assert stored.estimate == pytest.approx(evaluation.sum_of_recalls), "further recalls are not in the sum"
    for direction, matrix in (("text_to_video", scores), ("video_to_text", scores.T)):
        for metric in ("R@1", "R@5", "MnR"):
            found, values = measure([run], direction, metric), tied_values(matrix, metric)
            assert found.mean == pytest.approx(values.mean())
            low, high = np.quantile(values[random.integers(0, 80, (10_000, 80))].mean(1), [0.025, 0.975])
            assert (found.interval.low, found.interval.high) == pytest.approx((low, high), abs=0.8), metric
    table = pd.read_parquet(run.ranks)
    table.drop(columns="tied").to_parquet(run.ranks)
    with pytest.raises(UserError, match=r"ranks\.parquet does not contain ties"):
        measure(read_runs(tmp_path / "tied"), "text_to_video", "R@1")


def test_runs_in_folders_of_similar_names_have_their_own_pages(tmp_path):
    for folder, shift in (("a/b", 0), ("a-b", 1)):
        folder_of_scores(tmp_path / folder, np.roll(np.eye(20), shift, axis=0))
    runs = read_runs(tmp_path)
    assert len({run.key for run in runs}) == 2
    assert measure(runs, "text_to_video", "R@1").interval is not None
    runs[1].data = "another test set"
    assert measure(runs, "text_to_video", "R@1").interval is None
    assert main(["report", str(tmp_path), "--tables_only"]) == 0
    for run in runs:
        assert f"<td>{run.card.metrics('text_to_video')['R@1']:.1f} " in page_of(tmp_path, run)


def test_runs_that_omitted_texts_are_compared_on_the_others(tmp_path):
    for name, shift in (("first", 0), ("second", 1)):
        folder_of_scores(tmp_path / name, np.roll(np.eye(20), shift, axis=0))
    found = {"query": [3, 25], "captions": ["x", "y"], "right": ["v3", "v25"], "wrong": ["v4", "v1"], "names": []}
    arrays = {f"failures.{name}": np.array(values) for name, values in (found | {"strips": []}).items()}
    runs = read_runs(tmp_path)
    (compared,) = comparisons(runs, dict.fromkeys((run.key for run in runs), arrays), lambda name, content: None)
    assert compared["shown"] == {3: {"caption": "x", "right": "v3", "ranks": [1.0, 11.0]}}


def test_sums_of_different_recalls_are_not_compared(tmp_path):
    for name, recall in (("first", (1, 5)), ("second", (1, 50))):
        folder_of_scores(tmp_path / name, np.eye(20), recall)
    first, second = read_runs(tmp_path)
    compared = {metric: compare_runs([first], [second], "text_to_video", metric) for metric in ("R@1", "RSum", "SumR")}
    assert [metric for metric, found in compared.items() if found is not None] == ["R@1"]


def test_missing_values_are_dashes_and_another_process_that_writes_the_report_is_named(tmp_path, capsys):
    run, _ = folder_of_scores(tmp_path, np.eye(20))
    file = tmp_path / "results.json"
    file.write_text(file.read_text().replace('"R@5": 100.0', '"R@5": NaN'))
    with file_lock(tmp_path / "report.lock", "the report"):
        assert main(["report", str(tmp_path), "--tables_only"]) == 2
    assert f"Another process is writing the report {tmp_path / 'report'}" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--tables_only"]) == 0
    assert "<td>-</td>" in (page := page_of(tmp_path, run))
    assert "None" not in page


@pytest.mark.parametrize("name", ["results.json", "ranks.parquet", "metrics.csv"])
def test_a_damaged_file_of_a_run_is_named(finished_run, tmp_path, name):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / name).read_bytes()
    page, footer = whole[:4] + 60 * b"\xff" + whole[64:], whole[:-2000] + 500 * b"\xff" + whole[-1500:]
    holes = [page, footer] if name == "ranks.parquet" else []
    for content in (b"", b"hello\n", b"1,2\n3,4,5\n", bytes(range(128, 256)), *holes):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name} is damaged \("):
            [[read_curves(run), read_ranks(run, "text_to_video")] for run in read_runs(tmp_path)]


def test_a_run_without_ranks_has_a_page_without_figures(finished_run, tmp_path, capsys):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    (tmp_path / "ranks.parquet").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert "figures need ranks" in capsys.readouterr().out
    assert page_of(tmp_path, *read_runs(tmp_path))


def test_logging_the_geometry_of_increments_does_not_change_the_training(finished, run, root, tmp_path):
    recipes = (RECIPES / "gare.yaml", RECIPES / "fixture.yaml", finished / "tiny.yaml")
    options = [f"--data.init_args.root={root}", f"--results.directory={tmp_path}", "--trainer.log_every_n_steps=0"]
    options.append("--model.init_args.evaluation.audit=0")
    signals = signal.SIGTERM, signal.SIGUSR1
    handlers = list(map(signal.getsignal, signals))
    assert main(["fit", *(f"--config={path}" for path in recipes), *options]) == 0
    assert list(map(signal.getsignal, signals)) == handlers, "a handler would keep the run and its model in memory"
    (plain,) = read_runs(tmp_path)
    logged, without = (torch.load(each.card.checkpoint, weights_only=True)["state_dict"] for each in (run, plain))
    assert all(torch.equal(value, without[name]) for name, value in logged.items())
    curves = read_curves(run)
    gap, corrected = (curves[f"train/{name}_to_video-matching"] for name in ("text", "corrected"))
    assert len(gap) == len(curves["train/loss"]) > 1
    assert (gap != corrected).all()
    chart = draw_course(run)
    assert len(chart.images) == 5
    assert chart.title == "Geometry of the increments during training"


def test_figures_are_measured_again_only_if_the_run_was_repeated(finished, run, tmp_path, monkeypatch, capsys):
    first = page_of(finished, run)
    assert first.index("By chance, R@1") < first.index("Training curves") < first.index("Command to repeat")
    assert "Training curves" in first
    assert "Retrieval sheet: “" in first
    assert figures_of(run, finished / "figures")["sheet.strips"].std() > 1
    for name in ("cards", "figures"):
        shutil.copytree(finished / name, tmp_path / name)

    def fail(*_):
        raise ValueError("no <weights>")

    monkeypatch.setattr("tvr_lightning.reproduce.report.figures.figure_types.encode_run", fail)
    run_report(tmp_path, RECIPES)
    assert page_of(tmp_path, run) == first
    capsys.readouterr()
    run.card.results["seed"] = 7
    with pytest.raises(ValueError, match="no <weights>"):
        figures_of(run_of_card(run.card, run.ranks.parent), tmp_path / "figures")
    shutil.rmtree(tmp_path / "figures")
    run_report(tmp_path, RECIPES)
    assert f"No figures of {run.card.name}: no <weights>" in capsys.readouterr().out
    assert "no &lt;weights&gt;" in page_of(tmp_path, run)
    assert "Training curves" in page_of(tmp_path, run)


@pytest.mark.slow
def test_folders_of_fit_also_have_a_report(finished, run, tmp_path, monkeypatch):
    """The folder in which the card's run trained is one of `tvr fit`: same values, curves, and figures."""
    for name in ("fit/version_0", "fit/100% #1"):
        shutil.copytree(Path(run.card.checkpoint).parent.parent, tmp_path / name)
    measured = figures_of(run, finished / "figures")
    monkeypatch.setattr("tvr_lightning.reproduce.report.figures.figure_types.measure", lambda _: measured)
    run_report(tmp_path, RECIPES)
    _, plain = read_runs(tmp_path)
    assert plain.key == "fit-version_0"
    for metric in ("R@1", "R@5", "MnR"):
        expected, found = (measure([one], "video_to_text", metric) for one in (run, plain))
        assert (found.mean, found.interval) == (expected.mean, expected.interval)
    board = (tmp_path / "report" / "index.html").read_text()
    assert f"{run.card.metrics('text_to_video')['R@1']:.1f}" in board
    assert "All runs use synthetic data" in board
    assert (tmp_path / "report" / "runs" / "fit-100---1.html").is_file()
    assert "Training curves" in page_of(tmp_path, plain)
    assert "Retrieval sheet: “" in page_of(tmp_path, plain)
    assert "fit/100% #1" in (tmp_path / "report" / "queries.html").read_text()
