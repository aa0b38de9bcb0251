"""One synthetic dataset, and one finished run of a table with its report for all tests of this folder."""

from pathlib import Path

import pytest
from run_cards import RECIPES, TINY, plan_of

from tvr_lightning.cli.tables import report
from tvr_lightning.reproduce.runs.runner import run_plan

RESAMPLES = "tvr_lightning.reproduce.report.sources.RESAMPLES"


@pytest.fixture(scope="session")
def root(synthetic) -> Path:
    """Parent folder of a synthetic MSR-VTT of 20 videos, read-only."""
    return synthetic("msrvtt", 20)


@pytest.fixture(scope="session")
def finished(root, built_once) -> Path:
    """Output folder of `tvr reproduce` and `tvr report` after a run of two epochs, read-only."""

    def build(out):
        (out / "tiny.yaml").write_text(TINY.replace("max_epochs: 1", "max_epochs: 2"))
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
