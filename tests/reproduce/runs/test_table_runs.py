"""Every run of every table is built, trained for a step, and evaluated on its synthetic dataset."""

import json
import shutil
from functools import cache

import pytest
import torch
from run_cards import RECIPES, TINY, plan_of

from tvr_lightning.cli.tables import reproduce as run_reproduce
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.evaluation import results
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.reproduce.runs.card import read_card, read_cards
from tvr_lightning.reproduce.runs.execute import execute
from tvr_lightning.reproduce.runs.runner import write_fixture, write_task
from tvr_lightning.reproduce.tables import known_tables
from tvr_lightning.runs.log import quieten
from tvr_lightning.testing import random_pairs

VIDEOS = 12
STEP = """
trainer: {max_epochs: 1, limit_train_batches: 1, check_val_every_n_epoch: 1,
          log_every_n_steps: 1, accelerator: cpu}
model: {init_args: {encoder: {init_args: {width: 64, image_size: 32, vision_layers: 1}}}}
data: {init_args: {frames: 4, batch_size: 8, num_workers: 0, drop_last: false}}  # some rows set a batch of 128
"""


def option_names(settings, prefix=""):
    for name, value in settings.items():
        yield from option_names(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [prefix + name]


class Tables:
    """Runs of tables in one folder; a run of several tables is made once."""

    def __init__(self, folder):
        self.folder, self.kinds, self.executed, self.kept, self.built = folder, set(), set(), set(), set()
        self.overlay = folder / "step.yaml"
        self.overlay.write_text(STEP)

    def make(self, run, needed):
        write_fixture(run.dataset, self.folder / "fixture", VIDEOS, lambda line: None)
        names = option_names(run.settings)
        kind = (run.verb, *run.configs, *(n for n in names if not n.startswith("model.") or ".evaluation" in n))
        if needed or run.verb != "fit" or kind not in self.kinds:
            if run.key not in (self.kept if needed else self.executed):
                self.execute(run)
                self.executed.add(run.key)
                if needed:
                    self.kept.add(run.key)
                else:
                    shutil.rmtree(self.folder / "runs" / run.key)  # hundreds of checkpoints would fill a disk
        elif run.key not in self.executed | self.built:
            self.build(run)
        self.kinds.add(kind)
        self.built.add(run.key)

    def execute(self, run):
        cards = self.folder / "cards"
        inputs = {name: read_card(cards / f"{key}.json").checkpoint for name, key in run.needs.items()}
        execute(write_task(run, self.folder, inputs))
        card = read_card(cards / f"{run.key}.json")
        assert card.status == "finished"
        # Whether "1" reads as one batch or as all depends on which library named the union of both types first.
        assert card.steps >= 1 or run.verb != "fit"
        assert card.results["evaluation"]["questions"] > 0 if card.accuracy() is not None else card.results["texts"] > 0

    def build(self, run):
        arguments = json.loads(write_task(run, self.folder, {}).read_text())["arguments"]
        method, _ = from_recipe([], arguments)
        pairs = method.pair_features(random_pairs(method, 4))
        sum(method.losses(pairs).values()).backward()
        assert any(parameter.grad is not None for parameter in method.parameters())
        with torch.no_grad():
            assert method.eval().score(pairs.text, pairs.video).similarity.isfinite().all()


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvr_lightning.audit.callback._result", lambda *_: AuditResult(True))  # in the contract suite
        patch.setattr(results, "environment", cache(results.environment))
        yield Tables(tmp_path_factory.mktemp("tables"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:protocol. as-released:UserWarning")
@pytest.mark.parametrize("table", known_tables(RECIPES))
def test_every_run_of_a_table_trains_and_scores(table, tables):
    """Runs that differ from an earlier one only in options of the method take a step and score without a Trainer."""
    runs = plan_of(table, tables.folder / "fixture", fixture_videos=VIDEOS, overlay=tables.overlay).runs
    needed = {key for run in runs.values() for key in run.needs.values()}
    quieten()  # as the process of a run does
    for run in runs.values():
        print(run.name, run.configs, run.settings)
        tables.make(run, run.key in needed)


@pytest.mark.slow
def test_a_real_recipe_runs_on_real_annotations_and_reports_missing_videos(test_data, tmp_path, monkeypatch):
    # 15 of the 10,000 videos of MSR-VTT are there; the recipe is GARE's own but for the encoder's size.
    monkeypatch.setenv("TVR_DATA", str(test_data / "annotations"))
    overlay, out = tmp_path / "real.yaml", tmp_path / "out"
    short = TINY.replace("max_epochs: 1", "max_epochs: 1, limit_train_batches: 2")
    overlay.write_text(short.replace("num_workers: 0", "num_workers: 0, on_corrupt: skip"))
    assert run_reproduce(["gare-1"], only="gare", out=out, recipes=RECIPES, overlay=overlay) == 0
    (card,) = read_cards(out / "cards").values()
    assert card.run["fixture_videos"] is None
    assert card.run["fingerprints"]["data"] not in ("absent", "synthetic")
    assert card.results["partial"] is True
    assert 0 < card.results["videos"] < 15
    assert len(card.results["skipped"]) > 900
    assert card.results["config"]["model"]["init_args"]["optimizer"]["name"] == "bert-adam"
    table = (out / "tables" / "gare-1.md").read_text()
    assert "SYNTHETIC" not in table
    assert "PARTIAL" in table
