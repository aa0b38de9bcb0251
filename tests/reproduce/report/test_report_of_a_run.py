"""The report of a real run: its figures need its weights only once."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from metric_rows import summarize
from run_cards import RECIPES

from tvr_lightning.cli import main
from tvr_lightning.cli.tables import report as run_report
from tvr_lightning.evaluation.ranks import text_to_video_ranks
from tvr_lightning.reproduce.report.figures.encoded_split import encode_run
from tvr_lightning.reproduce.report.figures.figure_types import figures_of
from tvr_lightning.reproduce.report.figures.gare import draw_course
from tvr_lightning.reproduce.report.figures.retrieval_examples import measure_sheet
from tvr_lightning.reproduce.report.sources import read_curves, read_ranks, read_runs, run_of_card
from tvr_lightning.reproduce.report.uncertainty import measure

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
    assert "Training curves" in first
    assert "Retrieval sheet: “" in first
    assert figures_of(run, finished / "figures")["sheet.strips"].std() > 1
    for name in ("cards", "figures"):
        shutil.copytree(finished / name, tmp_path / name)

    def fail(_):
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
