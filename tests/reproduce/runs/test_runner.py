"""Runs of tables: in separate processes with cards, failures, engines, and resumption, and every run in one process."""

import errno
import json
import multiprocessing
import shutil
import subprocess
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import forked
import pytest
import torch
from child_processes import until
from run_cards import RECIPES, TINY, make_card, plan_of

import tvr_lightning
from tvr_lightning.cli import main
from tvr_lightning.cli.tables import reproduce as run_reproduce
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation import results
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.intervals import read_ranks
from tvr_lightning.progress import clock
from tvr_lightning.reproduce.report.sources import run_of_card
from tvr_lightning.reproduce.report.table_view import view_table
from tvr_lightning.reproduce.runs.card import read_card, read_cards
from tvr_lightning.reproduce.runs.engines import LocalEngine, SlurmEngine
from tvr_lightning.reproduce.runs.execute import PROGRESS, execute, run_task
from tvr_lightning.reproduce.runs.runner import (
    _Runner,
    durations_of,
    open_runs,
    plan_lines,
    run_plan,
    time_left,
    write_fixture,
    write_task,
)
from tvr_lightning.reproduce.tables import known_tables, load_table
from tvr_lightning.runs.log import quieten
from tvr_lightning.testing import random_pairs

TWO_DEVICES = """
trainer: {max_epochs: 1, log_every_n_steps: 1, accelerator: cpu, devices: 2, strategy: ddp}
model:
  init_args:
    encoder: {class_path: TinyClipEncoder, init_args: {width: 64, vision_layers: 1}}
    tuning: {class_path: FineTuning, init_args: {train: ["*"]}}
    optimizer: {name: adamw, lr: 1.0e-3, encoder_lr: 1.0e-3, per_tensor_clip: null}
data: {init_args: {frames: 4, batch_size: 8, num_workers: 0, captions_per_epoch: one, augmentation: none}}
"""


@pytest.mark.slow
def test_runs_share_an_encoder_and_its_stored_features(root, tmp_path):
    plan = tiny_plan(root, tmp_path, "gaid-9", ("gaid-dsl",), share="features")
    out, said = tmp_path / "out", []
    cards = run_plan(plan, out, said.append)
    assert [card.status for card in cards.values()] == ["finished"] * 4, [card.error for card in cards.values()]
    shared, stored, *heads = cards.values()
    assert [card.name for card in (shared, stored)] == ["shared/encoder", "shared/features-msrvtt"]
    assert (stored.run["verb"], stored.run["needs"]) == ("extract", {"encoder": shared.key})
    assert stored.results["written"]["frames"] == stored.results["written"]["audio"] == 20
    assert sum("features stored in" in line for line in said) == 1
    weights = torch.load(shared.checkpoint, weights_only=True)["state_dict"]
    for card in heads:
        assert card.run["needs"].items() >= {"encoder": shared.key, "features": stored.key}.items()
        encoder = tvr_lightning.load(card.checkpoint).module.encoder
        for name, value in encoder.state_dict().items():
            assert torch.equal(weights[f"encoder.{name}"], value)
    view = view_table(load_table("gaid-9", RECIPES), [run_of_card(card, out / "cards") for card in cards.values()])
    assert any("Heads are trained for 1 epochs on the stored features" in note for note in view.notes)
    shutil.rmtree(stored.features)
    (out / "cards" / f"{heads[0].key}.json").unlink()
    again = run_plan(plan, out, said.append)[heads[0].key]
    assert again.error == f"the features {stored.features} are missing. Also delete the card of their run."


def tiny_plan(root, folder, table="gaid-1", only=("clip4clip",), extra="", **setting):
    overlay = folder / "tiny.yaml"
    overlay.write_text(TINY + extra)
    return plan_of(table, root, only, fixture_videos=20, overlay=overlay, **setting)


def test_a_run_writes_its_card_and_is_not_repeated(root, tmp_path, monkeypatch):
    plan, out, said = tiny_plan(root, tmp_path, only=("clip4clip", "x-pool")), tmp_path / "new" / "out", []

    class Refusing(LocalEngine):
        refused = False

        def start(self, task):
            with pytest.raises(UserError, match="Another process is writing the runs of tvr reproduce in"):
                run_plan(plan, out, [].append)
            if not self.refused:
                self.refused = True
                raise OSError("the queue is full")
            return super().start(task)

    refused, card = run_plan(plan, out, said.append, Refusing()).values()
    assert (refused.status, refused.error) == ("failed", "OSError: the queue is full")
    assert card.status == "finished", card.error
    assert (card.steps, card.epochs, card.results["texts"], card.results["seed"]) == (2, 1, 4, 24)
    assert card.results["config"]["model"]["class_path"].endswith("XPool")
    assert card.results["environment"]["packages"]["torch"]
    assert card.seconds > 0
    assert card.peak_memory_mib > 50
    assert Path(card.checkpoint).is_file()
    assert set(card.run["fingerprints"]) == {"config", "code", "data", "weights", "files"}
    ranks, _ = read_ranks(out / "cards" / f"{card.key}.parquet", "text_to_video")
    assert 100 * ranks.found_within(1).mean() == pytest.approx(card.results["text_to_video"]["R@1"])
    assert any("nothing left to run" in line for line in said)
    said.clear()
    again = replace(plan, runs={card.key: plan.runs[card.key]})
    assert run_plan(again, out, said.append) == {card.key: card}
    assert said == []

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert run_plan(replace(plan, runs={}), out, said.append) == {}
    assert any("without file locks" in line and "do not start a second process" in line for line in said)


def test_a_failed_run_records_its_error_and_runs_that_need_it_fail(root, tmp_path):
    plan = tiny_plan(root, tmp_path, only=("gaid-dsl-b16",), extra="results: {select_on: val}\n")
    out, said = tmp_path / "out", []
    train, test = run_plan(plan, out, said.append).values()
    assert train.status == test.status == "failed"
    assert "select_on" in train.error
    assert "which failed" in test.error
    assert "FAILED" in said[1]
    assert len(open_runs(plan, read_cards(out / "cards"))) == 2


@pytest.fixture
def outdated(root, tmp_path) -> Path:
    """A task whose recipe changed after it was planned."""
    (run,) = tiny_plan(root, tmp_path).runs.values()
    task = write_task(run, tmp_path, {})
    (tmp_path / "tiny.yaml").write_text(TINY.replace("max_epochs: 1", "max_epochs: 2"))
    return task


CHANGED = "gaid-1/clip4clip: config changed after the run was planned"


@pytest.mark.slow
def test_a_job_that_ended_unnoticed_is_submitted_again(outdated, tmp_path):
    known = outdated.with_name("job.txt")
    known.write_text("12345678")
    job = SlurmEngine(tmp_path / "jobs", cluster="local").start(outdated)
    assert known.read_text() != "12345678"
    while (status := job()) is None:
        time.sleep(0.2)
    assert status == 1
    assert CHANGED in outdated.with_name("log.txt").read_text()
    assert not known.exists()


def test_the_processes_of_a_job_write_into_one_log(outdated, ended):
    """SLURM starts one per device; what any of them says before it dies is kept."""
    context = multiprocessing.get_context("forkserver")
    processes = [ended(context.Process(target=run_task, args=(outdated,))) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert outdated.with_name("log.txt").read_text().count(CHANGED) == 2
    with pytest.raises(UserError, match=CHANGED):
        execute(outdated)


@pytest.mark.slow
def test_question_answering_under_submitit_records_every_question(root, tmp_path):
    plan, out = tiny_plan(root, tmp_path, "dpdv-s4", ("dpdv-vqa",)), tmp_path / "out"
    engine = SlurmEngine(tmp_path / "jobs", max_parallel_jobs=1, cluster="local")
    engine.poll_seconds = 0.2
    (card,) = run_plan(plan, out, [].append, engine).values()
    assert card.status == "finished", card.error
    assert len(list((tmp_path / "jobs").glob("*_result.pkl"))) == 1
    assert not (out / "runs" / card.key / "job.txt").exists()
    ranks, video = read_ranks(out / "cards" / f"{card.key}.parquet", "question")
    assert len(ranks) == len(video) == card.results["evaluation"]["questions"]
    assert 100 * ranks.found_within(1).mean() == pytest.approx(card.accuracy())


@pytest.mark.slow
def test_a_run_on_two_devices_writes_its_card(root, tmp_path):
    # As with real data: a separate command, which Lightning repeats for the second device.
    overlay = tmp_path / "two.yaml"
    overlay.write_text(TWO_DEVICES)
    plan = plan_of("gaid-1", root, ["clip4clip"], overlay=overlay)
    (card,) = run_plan(plan, tmp_path / "out", [].append).values()
    assert card.status == "finished", card.error
    assert card.results["config"]["trainer"]["devices"] == 2
    assert card.steps == 2


def test_a_dry_run_shows_the_plan_and_its_data(tmp_path, capsys, monkeypatch):
    def dry_run(*words):
        return main(["reproduce", *words, "--dry_run", f"--recipes={RECIPES}", f"--out={tmp_path / 'out'}"])

    monkeypatch.delenv("TVR_DATA", raising=False)
    assert dry_run("gare-1", "ncl-1", "--seeds", "0,1") == 0
    said = capsys.readouterr().out
    for part in ("SYNTHETIC FIXTURE", "gare-1/gare on msrvtt, seed 1", "ncl-1/ncl on activitynet, seed 0"):
        assert part in said
    assert said.endswith("12 runs left\n")
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("TVR_DATA", str(tmp_path))
    for options, synthetic in ((), False), (("--fixture", "--fixture_videos=20"), True):
        assert dry_run("gare-1", *options) == 0
        assert ("SYNTHETIC" in capsys.readouterr().out) == synthetic
    for option, message in (
        ("--share=features", "--share features is only for the synthetic datasets"),
        ("--fixture_videos=20", "--fixture_videos can only be used for synthetic datasets. Add --fixture."),
    ):
        assert dry_run("gare-1", option) == 2
        assert message in capsys.readouterr().err


def test_the_remaining_time_is_estimated_from_finished_runs(root, tmp_path):
    plan = tiny_plan(root, tmp_path, table="gare-1", only=())
    first, *rest = plan.runs.values()
    card = make_card(first, tmp_path / "cards", 1.0, seconds=90.0)
    left, known = f"{len(rest)} runs left", durations_of({card.key: card})
    assert time_left(rest, []) == time_left([replace(run, fixture_videos=None) for run in rest], known) == left
    assert time_left(rest, known) == f"{left}, about {clock(90 * len(rest))}"
    assert time_left(rest, known, 2) == f"{left}, about {clock(45 * len(rest))}"
    assert time_left(rest[:1], known) == "1 run left, about 0:01:30"
    lines = plan_lines(plan, {card.key: card})
    assert sum(line.startswith("finished") for line in lines) == 1
    assert sum(line.endswith("about 0:01:30") for line in lines[:-1]) == len(rest)
    runner = _Runner(tmp_path, print, LocalEngine(), {}, rest, 1 + len(rest))
    runner.running[first.key] = (first, None, time.time() - 60)
    assert runner.state() == f"{first.name}: starting; {1 + len(rest)} runs left"
    (tmp_path / "runs" / first.key).mkdir(parents=True)
    (tmp_path / "runs" / first.key / PROGRESS).write_text('{"doing": "training, step 2 of 6", "left": 120.0}')
    doing, total = f"{first.name}: training, step 2 of 6, 0:02:00 left", clock(120 + 180 * len(rest))
    assert runner.state() == f"{doing}; {1 + len(rest)} runs left, about {total}"


@pytest.mark.slow
def test_a_killed_command_resumes(root, tmp_path, ended):
    """Two runs; the command is killed in the second, and the process of this run ends with it."""
    out, overlay = tmp_path / "out", tmp_path / "tiny.yaml"
    overlay.write_text(TINY)
    out.mkdir()
    (out / "fixture-20").symlink_to(root)
    options = ["--only=clip4clip,baseline", "--fixture", "--fixture_videos=20", f"--out={out}", f"--recipes={RECIPES}"]
    command = ["reproduce", "gare-1", *options, f"--overlay={overlay}"]
    process = ended(forked.started(command, tmp_path))  # in a separate session, so that all its processes can be found
    until(lambda: [*out.glob("cards/*.json")] and len([*out.glob("runs/*/log.txt")]) == 2)
    process.kill()
    process.join()
    (first,) = out.glob("cards/*.json")
    written = first.stat().st_mtime_ns
    second = next(path for path in out.glob("runs/*") if path.name != first.stem)
    alive = ["pgrep", "-s", str(process.pid)]
    until(lambda: subprocess.run(alive, check=False, stdout=subprocess.DEVNULL).returncode, seconds=120)
    assert not (out / "cards" / f"{second.name}.json").exists()
    assert main(command) == 0
    assert first.stat().st_mtime_ns == written
    assert len(read_cards(out / "cards")) == 2
    assert (out / "tables" / "gare-1.md").is_file()


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
