"""Every run of every table is built, trained for a step, and evaluated on its synthetic dataset."""

import json

import pytest
from run_cards import RECIPES, plan_of

from tvr_lightning.cli.tables import reproduce as run_reproduce
from tvr_lightning.reproduce.runs.card import read_card, read_cards
from tvr_lightning.reproduce.runs.execute import execute
from tvr_lightning.reproduce.runs.runner import write_fixture, write_task
from tvr_lightning.reproduce.tables import known_tables, load_table
from tvr_lightning.runs.log import quieten

VIDEOS = 12
STEP = """
trainer: {max_epochs: 1, limit_train_batches: 1, check_val_every_n_epoch: 1,
          log_every_n_steps: 1, accelerator: cpu}
model: {init_args: {encoder: {init_args: {width: 64, vision_layers: 1}}}}
data: {init_args: {batch_size: 4, num_workers: 0, drop_last: false}}  # some rows set a batch of 128
"""

REAL = """
trainer: {max_epochs: 1, limit_train_batches: 10, check_val_every_n_epoch: 1, log_every_n_steps: 1, accelerator: cpu}
model: {init_args: {encoder: {class_path: TinyClipEncoder, init_args: {width: 64, vision_layers: 1}}}}
data: {init_args: {on_corrupt: skip, frames: 4, batch_size: 4, num_workers: 0}}
"""

RUNS = [(table, run.name) for table in known_tables(RECIPES) for run in load_table(table, RECIPES).runs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:protocol. as-released:UserWarning")  # what leaks says so
@pytest.mark.filterwarnings("ignore:dual softmax .* some scores are below zero:UserWarning")
@pytest.mark.parametrize(("table", "run_name"), RUNS)
def test_a_run_trains_a_step_and_is_evaluated(table, run_name, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "runs"
    folder.mkdir(exist_ok=True)
    overlay = folder / "step.yaml"
    overlay.write_text(STEP)
    root = folder / "fixture"
    runs = plan_of(table, root, [f"{table}/{run_name}"], fixture_videos=VIDEOS, overlay=overlay).runs
    for run in runs.values():
        write_fixture(run.dataset, root, VIDEOS, lambda line: None)
        path = folder / "cards" / f"{run.key}.json"
        if path.is_file():
            continue
        inputs = {name: read_card(folder / "cards" / f"{key}.json").checkpoint for name, key in run.needs.items()}
        quieten()  # as the process of a run does
        execute(write_task(run, folder, inputs))
        card = read_card(path)
        assert card.status == "finished"
        # Whether "1" reads as one batch or as all depends on which library named the union of both types first.
        assert card.steps >= 1 or run.verb != "fit"
        results = json.loads(path.read_text())["results"]
        assert results["evaluation"]["questions"] > 0 if card.accuracy() is not None else results["texts"] > 0


def test_a_real_recipe_runs_on_real_annotations_and_reports_missing_videos(test_data, tmp_path, monkeypatch):
    # 15 of the 10,000 videos of MSR-VTT are there; the recipe is GARE's own but for the encoder's size.
    monkeypatch.setenv("TVR_DATA", str(test_data / "annotations"))
    overlay, out = tmp_path / "real.yaml", tmp_path / "out"
    overlay.write_text(REAL)
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
