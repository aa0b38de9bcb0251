"""One synthetic dataset, one finished run of a table with its report, and one browser for all tests of this folder."""

from pathlib import Path

import pytest
from browser import open_browser
from run_cards import RECIPES, plan_of

from tvr_lightning.cli.tables import report
from tvr_lightning.reproduce.runs.runner import run_plan

RESAMPLES = "tvr_lightning.reproduce.report.sources.RESAMPLES"
TINY = """
trainer: {max_epochs: 2, check_val_every_n_epoch: 1, log_every_n_steps: 1, accelerator: cpu}
model: {init_args: {encoder: {class_path: TinyClipEncoder, init_args: {width: 64, image_size: 32, vision_layers: 1}}}}
data: {init_args: {frames: 4, batch_size: 8, num_workers: 0}}
"""


@pytest.fixture(scope="session")
def root(synthetic) -> Path:
    """Parent folder of a synthetic MSR-VTT of 20 videos, read-only."""
    return synthetic("msrvtt", 20)


@pytest.fixture(scope="session")
def finished(root, built_once) -> Path:
    """Output folder of `tvr reproduce` and `tvr report` after a run of two epochs, read-only."""

    def build(out):
        (out / "tiny.yaml").write_text(TINY)
        plan = plan_of("gare-1", root, ["gare"], fixture_videos=20, overlay=out / "tiny.yaml")
        (card,) = run_plan(plan, out, lambda line: None).values()
        assert card.status == "finished", card.error
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RESAMPLES, 100)
            report(out, RECIPES)

    return built_once("reported", build)


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr(RESAMPLES, 100)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
