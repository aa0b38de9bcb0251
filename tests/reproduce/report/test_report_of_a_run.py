"""From a real run to its page: figures come from the run's own weights, and once measured need them no more."""

from html import unescape
from pathlib import Path

import pytest
from browser import open_browser

from tvr_lightning.evaluation.metrics import summarize
from tvr_lightning.evaluation.ranks import text_to_video_ranks
from tvr_lightning.reproduce.report.figures.curves import read_curves
from tvr_lightning.reproduce.report.figures.encoded_split import encode_run
from tvr_lightning.reproduce.report.figures.kinds import figures_of
from tvr_lightning.reproduce.report.figures.sheet import measure_sheet
from tvr_lightning.reproduce.report.folder import read_folder
from tvr_lightning.reproduce.report.page import page
from tvr_lightning.reproduce.report.report_verb import run_report, section_of
from tvr_lightning.reproduce.runs.card import read_ranks
from tvr_lightning.reproduce.runs.plan import FIXTURE_SEED, Setting, make_plan
from tvr_lightning.reproduce.runs.runner import Folders, run_plan
from tvr_lightning.reproduce.tables import load_table
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parents[3] / "recipes"
VIDEOS = 20
TINY = """
trainer: {max_epochs: 2, check_val_every_n_epoch: 1, log_every_n_steps: 1, accelerator: cpu}
model: {init_args: {encoder: {class_path: TinyClipEncoder, init_args: {width: 64, image_size: 32, vision_layers: 1}}}}
data: {init_args: {frames: 4, batch_size: 8, num_workers: 0}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `tvr reproduce` leaves of one run."""
    out = tmp_path_factory.mktemp("run")
    synthesize("msrvtt", out / "fixture", VIDEOS, FIXTURE_SEED, workers=1, progress=False)
    (out / "tiny.yaml").write_text(TINY)
    plan = make_plan(
        [load_table("gare-1", RECIPES)], Setting(RECIPES, out / "fixture", VIDEOS, out / "tiny.yaml"), ["baseline"]
    )
    (card,) = run_plan(plan, Folders(out), lambda line: None).values()
    assert card.status == "finished", card.error
    return out


def test_the_run_is_rebuilt_with_its_own_weights(folder):
    (card,) = read_folder(folder).values()
    encoded = encode_run(card, folder / "cards")
    ranks = text_to_video_ranks(encoded.similarity, encoded.matching)
    assert summarize(ranks, (1, 5, 10)) == pytest.approx(card.metrics("text_to_video"))


def test_curves_are_those_that_the_run_logged(folder):
    (card,) = read_folder(folder).values()
    curves = read_curves(card)
    assert curves["train/loss"][0].tolist() == list(range(card.steps))
    assert curves["val/t2v_R@1"][1][-1] == pytest.approx(card.metrics("text_to_video")["R@1"])


def test_ranks_of_the_sheet_are_the_cards(folder):
    (card,) = read_folder(folder).values()
    ranks, _ = read_ranks(card.key, folder / "cards", "text_to_video")
    assert set(measure_sheet(encode_run(card, folder / "cards"))["rank"]) <= set(ranks.expected().tolist())


def test_a_repeated_run_is_measured_again(folder, tmp_path):
    (card,) = read_folder(folder).values()
    (tmp_path / "cards").symlink_to(folder / "cards")
    figures_of(card, tmp_path / "figures")
    place = tmp_path / "figures" / f"{card.key}.npz"
    before = place.stat().st_mtime_ns
    first = figures_of(card, tmp_path / "figures")
    assert place.stat().st_mtime_ns == before
    card.results = {**card.results, "seed": 7}
    again = figures_of(card, tmp_path / "figures")
    assert place.stat().st_mtime_ns > before
    assert str(again["results"]) != str(first["results"])


def test_a_run_whose_videos_are_gone_loses_the_figures_that_show_them_alone(folder, tmp_path, monkeypatch):
    (card,) = read_folder(folder).values()
    encoded = encode_run(card, folder / "cards")
    videos = folder / "fixture" / "msrvtt" / "videos"
    hidden = videos.rename(videos.with_name("hidden"))
    try:
        # As with stored features: the test split is encoded, but no video is there to be shown.
        monkeypatch.setattr("tvr_lightning.reproduce.report.figures.kinds.encode_run", lambda *_: encoded)
        section = section_of(card, tmp_path)
        (tmp_path / "cards").symlink_to(folder / "cards")
        written = page([], [section])
    finally:
        hidden.rename(videos)
    charts = {chart.title: chart for chart in section.charts}
    assert charts["Retrieval sheet"].note.startswith("Not drawn: ")
    assert charts["Retrieval sheet"].note in unescape(written)
    assert charts["Scores of matching and of other pairs"].svg
    assert charts["Training curves"].svg
    assert section.missing is None


def test_the_page_is_drawn_once_the_weights_are_gone(folder):
    (card,) = read_folder(folder).values()
    assert run_report(folder, RECIPES) == 0
    first = (folder / "report.html").read_text(encoding="utf-8")
    assert "Training curves" in first
    assert "Retrieval sheet" in first
    Path(card.checkpoint).unlink()
    assert run_report(folder, RECIPES) == 0
    assert (folder / "report.html").read_text(encoding="utf-8") == first
    assert figures_of(card, folder / "figures")["sheet.strips"].std() > 1


def test_a_figure_that_fails_is_said_on_the_page_and_loses_nothing_else(folder, monkeypatch, capsys):
    (card,) = read_folder(folder).values()

    def fail(*_):
        raise ValueError("no direction of a gradient of zero")

    monkeypatch.setattr("tvr_lightning.reproduce.report.report_verb.figures_of", fail)
    assert run_report(folder, RECIPES) == 0
    assert f"No figures of {card.name}: no direction of a gradient of zero" in capsys.readouterr().out
    written = (folder / "report.html").read_text(encoding="utf-8")
    assert "no direction of a gradient of zero" in written
    assert "Training curves" in written


def test_a_phone_shows_words_of_figures_that_can_be_read(folder, tmp_path):
    assert run_report(folder, RECIPES) == 0
    sizes = """
        document.querySelectorAll('details').forEach(d => d.open = true);
        return [...document.querySelectorAll('.chart svg text')].map(text => {
            const scale = text.getScreenCTM();
            return Math.hypot(scale.a, scale.b) * parseFloat(getComputedStyle(text).fontSize);
        })"""
    with open_browser(tmp_path) as browser:
        phone = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        browser.get((folder / "report.html").as_uri())
        found = browser.execute_script(sizes)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    assert len(found) > 100
    assert min(found) >= 9
