"""The folder of a run: its log, metrics, number, and table, also with loggers and for runs that start together.

The table after training, the checkpoint that it names, and the description of both are of the same weights.
"""

import json
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import forked
import pandas as pd
import pytest
import torch
import yaml
from child_processes import until
from lightning.pytorch.loggers import Logger
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.runs.folder import METRICS, create_run, metrics_logger, new_run, run_of
from tvr_lightning.runs.log import FILE, tee_log
from tvr_lightning.runs.resume import AtomicCheckpointIO

SECONDS = 300


def test_the_log_contains_the_lines_of_the_screen_without_bars(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with tee_log(tmp_path / "run"):
        sys.stdout.write("\x1b[1mbold\x1b[0m ")
        print("Epoch 3 ━━━━━ 4/9", file=sys.stderr)
        print("word\n┏━━━━━━┓\n\rEpoch 1/3 ━━━╸ 2/9 0:00:01\rlast")
        print("Epoch 1/5, step 3 of 9, 0:00:01 left of the run\nvalidate, batch 1 of 3")
        logging.getLogger("lightning.pytorch").warning("careful")
    assert (tmp_path / "run" / FILE).read_text(encoding="utf-8") == "bold word\n┏━━━━━━┓\nlast\ncareful\n"
    assert "\x1b[1mbold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("existing", "steps", "left"),
    [
        (None, 0, []),
        (None, 3, ["version_0"]),
        ("", 0, []),
        ("version_0", 0, ["version_0"]),
        ("version_7", 0, ["version_7"]),
    ],
)
def test_a_run_that_fails_before_its_first_step_removes_only_its_folder(existing, steps, left, tmp_path):
    runs = tmp_path / "method-data"
    if existing is not None:
        (runs / existing).mkdir(parents=True)

    def fail():
        with new_run(runs, SimpleNamespace(global_step=steps)) as folder:
            (folder / "config.yaml").touch()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert sorted(path.name for path in tmp_path.glob("method-data/*")) == left
    assert runs.is_dir() == (existing is not None or bool(left))


def test_a_new_run_has_the_number_after_the_highest_one(tmp_path):
    for name in ("version_2", "version_10", "version_old", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "version_11").touch()
    assert create_run(tmp_path) == tmp_path / "version_12"
    assert create_run(tmp_path) == tmp_path / "version_13"
    assert not list((tmp_path / "version_13").iterdir())


def test_the_run_of_a_checkpoint_is_a_writable_folder_with_its_config(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    assert run_of(str(checkpoint)) is None
    (tmp_path / "run" / "config.yaml").touch()
    assert run_of(str(checkpoint)) == tmp_path / "run"
    assert run_of(str(tmp_path / "last.ckpt")) is None
    assert run_of(None) is None
    if os.geteuid():  # root writes everywhere
        (tmp_path / "run").chmod(0o500)
        assert run_of(str(checkpoint)) is None


@pytest.mark.filterwarnings("ignore:Experiment logs directory")  # commands filter it
def test_metrics_of_a_resumed_run_continue_and_those_of_a_new_run_start_empty(tmp_path):
    run, checkpoint = tmp_path / "run", tmp_path / "running.ckpt"
    first = metrics_logger(run)
    for step in range(6):
        first.log_metrics({"train/loss": 10.0 - step, "epoch": step // 2}, step)
    with (run / METRICS).open("a") as file:
        file.write("2,")  # incomplete after an interruption
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"global_step": 4, "hyper_parameters": {}}, checkpoint)
    writer.teardown()
    again = metrics_logger(run, checkpoint)
    assert pd.read_csv(run / METRICS)["step"].tolist() == [0, 1, 2, 3]
    again.log_metrics({"train/loss": 1.0, "epoch": 2}, 4)
    again.log_metrics({"val/t2v_R@1": 50.0, "epoch": 2}, 4)
    found = pd.read_csv(run / METRICS)
    assert found["step"].tolist() == [0, 1, 2, 3, 4, 4]
    assert found["epoch"].tolist() == [0, 0, 1, 1, 2, 2]
    assert found["train/loss"].dropna().tolist() == [10.0, 9.0, 8.0, 7.0, 1.0]
    assert found["val/t2v_R@1"].dropna().tolist() == [50.0]

    new = tmp_path / "new"
    for value in (1.0, 2.0):
        metrics_logger(new).log_metrics({"train/loss": value}, 0)
    assert pd.read_csv(new / METRICS)["train/loss"].tolist() == [2.0]


def fit(root, runs, seed, *more):
    short = ("--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=5", f"--seed_everything={seed}")
    return ["fit", *small_run(root, runs, *short, *more, recipe="xpool")]


def table(run):
    """Return the seed and the measured values in `results.json`."""
    results = json.loads((run / "results.json").read_text())
    return {key: results[key] for key in ("seed", "text_to_video", "video_to_text", "sum_of_recalls", "skipped")}


@pytest.fixture(scope="module")
def tables(msrvtt, tmp_path_factory):
    """Tables of two consecutive runs, by their seeds."""
    runs = tmp_path_factory.mktemp("expected")
    for seed in (1, 3):
        assert main(fit(msrvtt, runs / str(seed), seed)) == 0
    found = {seed: table(runs / str(seed) / "xpool-msrvtt" / "version_0") for seed in (1, 3)}
    values = [{name: value for name, value in found[seed].items() if name != "seed"} for seed in found]
    assert values[0] != values[1], "the tables must differ"
    return found


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_runs_paused_while_they_start_have_two_folders_and_two_tables(first, msrvtt, tmp_path, ended, tables):
    """Both are paused when they have named their folders, and either may continue first."""
    runs, processes = tmp_path / "runs", []
    for seed in tables:
        folder = tmp_path / str(seed)
        folder.mkdir()
        process, output = ended(forked.started(fit(msrvtt, runs, seed), folder)), folder / "out-0.txt"
        until(lambda p=process, o=output: (o.is_file() and "writes to" in o.read_text()) or not p.is_alive())
        os.kill(process.pid, signal.SIGSTOP)
        processes.append(process)
    for process in (processes[first], processes[1 - first]):
        os.kill(process.pid, signal.SIGCONT)
        process.join(SECONDS)
        assert process.exitcode == 0
    folders = sorted((runs / "xpool-msrvtt").iterdir())
    assert [folder.name for folder in folders] == ["version_0", "version_1"]
    assert sorted((table(folder) for folder in folders), key=lambda found: found["seed"]) == list(tables.values())


def test_folders_created_at_the_same_moment_have_the_numbers_from_zero(tmp_path):
    together = threading.Barrier(16)

    def create(number):
        together.wait()
        return create_run(tmp_path / "runs")

    with ThreadPoolExecutor(16) as pool:
        folders = sorted(pool.map(create, range(16)), key=lambda folder: int(folder.name.removeprefix("version_")))
    assert folders == [tmp_path / "runs" / f"version_{number}" for number in range(16)]


def test_resuming_refuses_a_run_that_is_alive(msrvtt, tmp_path, ended, capsys):
    words = fit(msrvtt, tmp_path / "runs", 1, "--trainer.max_epochs=3")
    run = tmp_path / "runs" / "xpool-msrvtt" / "version_0"
    last = run / "checkpoints" / "last.ckpt"
    process = ended(forked.started(words, tmp_path))
    until(lambda: last.is_file() or not process.is_alive())
    os.kill(process.pid, signal.SIGSTOP)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main([*words, "--checkpoints.resume=true"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert str(run) in error
    assert "Another process is writing the run" in error
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    process.kill()
    process.join()
    assert main([*words, "--checkpoints.resume=true"]) == 0
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    assert torch.load(last, weights_only=True)["epoch"] == 2


class Stub(Logger):
    """A logger that counts what it is given; name and version are a service's, not a folder's."""

    name, version = "lightning_logs", "3k2j1x9z"  # an ID that the service assigns
    save_dir = None
    logged = 0

    def __init__(self, save_dir: str | None = None):
        super().__init__()
        self.save_dir = save_dir

    def log_metrics(self, metrics, step=None):
        Stub.logged += 1

    def log_hyperparams(self, params, *args, **kwargs):
        pass


LOGGERS = {
    "wandb": f"{{class_path: {__name__}.Stub, init_args: {{save_dir: .}}}}",  # one folder for all runs
    "mlflow": f"{{class_path: {__name__}.Stub, init_args: {{save_dir: null}}}}",  # a server
    "csv": "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: csv}}",
    "none": "false",
    "lightning's": "true",  # would write to lightning_logs what metrics.csv has
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LOGGERS if name != "wandb"]


@pytest.mark.parametrize("name", ["wandb", *SLOW])
def test_results_and_resuming_do_not_depend_on_the_logger(name, msrvtt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = f"--trainer.logger={LOGGERS[name]}"
    more = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=1")
    arguments = ["fit", *small_run(msrvtt, Path("runs"), *more, logger, recipe="xpool")]
    Stub.logged = 0
    assert main(arguments) == 0
    run = tmp_path / "runs" / "xpool-msrvtt" / "version_0"
    made = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert made >= {"results.json", "results.csv", "config.yaml", "checkpoints/last.ckpt", "checkpoints/best.ckpt"}
    assert made >= {"metrics.csv", "log.txt", "run.md", "ranks.parquet"}
    assert (Stub.logged > 0) == (name in ("wandb", "mlflow"))
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 1
    results = json.loads((run / "results.json").read_text())
    assert Path(results["weights"]["run"]) == Path("runs/xpool-msrvtt/version_0")
    before = (run / "results.json").stat().st_mtime_ns
    assert main([*arguments, "--checkpoints.resume=true"]) == 0
    assert (run / "results.json").stat().st_mtime_ns > before
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    assert {path.name for path in Path.cwd().iterdir()} <= {"runs", "csv"}
    assert main(["test", f"--ckpt_path={run}/checkpoints/last.ckpt", logger]) == 0
    assert (run / "test" / "version_0" / "results.json").is_file()


CALLBACK = "--trainer.callbacks"
EMA = (f"{CALLBACK}+=EMAWeightAveraging", f"{CALLBACK}.decay=0.9")
SWA = (f"{CALLBACK}+=StochasticWeightAveraging", f"{CALLBACK}.swa_lrs=0.01", f"{CALLBACK}.swa_epoch_start=1")


def averages(saved):
    """Return the averages of parameters in the state of SWA's callback, or those in a checkpoint of EMA's."""
    for state in saved["callbacks"].values():
        if "average_model_state" in state:
            return state["average_model_state"]
    assert not torch.equal(*(saved[name]["temperature.logit_scale"] for name in ("state_dict", "current_model_state")))
    return saved["state_dict"]


@pytest.mark.filterwarnings(  # Lightning's remarks on sharding, the schedule, and callbacks that `tvr test` omits
    "ignore:You're using the WeightAveraging", "ignore:SWA is currently only supported", "ignore:Be aware that when"
)
@pytest.mark.parametrize(
    ("callback", "name"),
    [
        pytest.param(EMA, "last", id="ema-last"),
        pytest.param(EMA, "best", id="ema-best", marks=pytest.mark.slow),
        pytest.param(SWA, "last", id="swa-last", marks=pytest.mark.slow),
    ],
)
def test_the_table_of_a_run_with_averaged_weights_is_that_of_its_checkpoint(callback, name, msrvtt, tmp_path):
    select_on = "last" if name == "last" else "test"
    more = (*callback, f"--results.select_on={select_on}")
    assert main(["fit", *small_run(msrvtt, tmp_path, *more)]) == 0
    (run,) = tmp_path.glob("*/*")
    trained = json.loads((run / "results.json").read_text())
    checkpoint = run / "checkpoints" / f"{name}.ckpt"
    assert trained["checkpoint"] == str(checkpoint)
    saved = torch.load(checkpoint, weights_only=True)
    average = averages(saved)
    for parameter, value in saved["state_dict"].items():
        torch.testing.assert_close(value, average[parameter], msg=parameter)
    assert trained["weights"]["averaged"]
    assert main(["test", f"--ckpt_path={checkpoint}"]) == 0
    tested = json.loads((run / "test" / "version_0" / "results.json").read_text())
    for section in ("text_to_video", "video_to_text", "weights", "checkpoint"):
        assert tested[section] == trained[section]
    ranks = [pd.read_parquet(folder / "ranks.parquet") for folder in (run, run / "test" / "version_0")]
    pd.testing.assert_frame_equal(*ranks)


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging")
@pytest.mark.parametrize("callback", [EMA, ()], ids=["ema", "none"])
def test_a_run_without_a_checkpoint_reports_its_last_weights_and_whether_they_are_averaged(callback, msrvtt, tmp_path):
    more = (*callback, "--trainer.enable_checkpointing=false", "--trainer.max_epochs=1", "--data.init_args.split=7k")
    assert main(["fit", *small_run(msrvtt, tmp_path, *more)]) == 0
    (path,) = tmp_path.glob("*/*/results.json")
    found = json.loads(path.read_text())
    expected = {"kind": "last", "epoch": 1, "step": 2, "averaged": bool(callback)}  # 7k has fewer videos
    assert found["weights"].items() >= expected.items()
    assert found["protocol"] == "1k-A, one caption per video, trained on 7k"
    page = path.with_name("run.md").read_text()
    assert ("- averaged weights of the last step" in page) == bool(callback)
