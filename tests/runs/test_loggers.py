"""A run's files are in the run's folder, and it is resumed from there, regardless of its logger."""

import json
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import Logger
from small_run import small_run

from tvr_lightning.cli import main


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
