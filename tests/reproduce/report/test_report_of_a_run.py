"""The report of a real run: its figures need its weights only once."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from metric_rows import summarize
from run_cards import RECIPES

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
from tvr_lightning.reproduce.report.figures.encoded_split import encode_run
from tvr_lightning.reproduce.report.figures.figure_types import figures_of
from tvr_lightning.reproduce.report.figures.gare import draw_course
from tvr_lightning.reproduce.report.figures.retrieval_examples import comparisons, measure_sheet
from tvr_lightning.reproduce.report.sources import (
    compare_runs,
    measure,
    read_curves,
    read_ranks,
    read_runs,
    run_of_card,
)
from tvr_lightning.runs.closing import write_query_ranks

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def run(finished):
    (run,) = read_runs(finished)
    return run


def page_of(folder, run):
    return (folder / "report" / "runs" / f"{run.key}.html").read_text(encoding="utf-8")


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


def test_two_processes_do_not_write_one_report(tmp_path, capsys):
    folder_of_scores(tmp_path / "a", np.eye(20))
    with file_lock(tmp_path / "report.lock", "the report"):
        assert main(["report", str(tmp_path), "--tables_only"]) == 2
    assert f"Another process is writing the report {tmp_path / 'report'}" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--tables_only"]) == 0


def test_missing_values_are_dashes_and_a_damaged_file_is_named(tmp_path, capsys):
    run, _ = folder_of_scores(tmp_path / "a", np.eye(20))
    file = tmp_path / "a" / "results.json"
    file.write_text(file.read_text().replace('"R@5": 100.0', '"R@5": NaN'))
    assert main(["report", str(tmp_path / "a"), "--tables_only"]) == 0
    assert "<td>-</td>" in (page := page_of(tmp_path / "a", run))
    assert "None" not in page
    file.write_text("{")
    assert main(["report", str(tmp_path), "--tables_only"]) == 2
    assert "results.json is damaged" in capsys.readouterr().err


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
