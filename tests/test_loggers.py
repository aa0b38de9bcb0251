"""A run's files lie in the run's folder, and it is resumed from there, whatever logger it has."""

import json
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import Logger

from tvr_lightning.cli import main
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parent.parent / "recipes"


class Stub(Logger):
    """A logger that counts what it is given; name and version are a service's, not a folder's."""

    logged: int = 0

    @property
    def name(self) -> str:
        return "lightning_logs"

    @property
    def version(self) -> str:
        return "3k2j1x9z"  # an id that the service gives

    def log_metrics(self, metrics, step=None):
        type(self).logged += 1

    def log_hyperparams(self, params, *args, **kwargs):
        pass


class LikeWandb(Stub):
    """WandbLogger: `save_dir` is one folder for all runs, the working directory by default."""

    def __init__(self, save_dir: str = "."):
        super().__init__()
        self._save_dir = save_dir

    @property
    def save_dir(self) -> str:
        return self._save_dir


class LikeMlflow(Stub):
    """MLFlowLogger: `save_dir` is the folder of a local tracking address, and None of a server's."""

    def __init__(self, tracking_uri: str = "http://127.0.0.1:5000"):
        super().__init__()
        self._tracking_uri = tracking_uri

    @property
    def save_dir(self) -> str | None:
        return self._tracking_uri.removeprefix("file:") if self._tracking_uri.startswith("file:") else None


@pytest.fixture(scope="module")
def fixture_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("fixture")
    synthesize("msrvtt", root, 16, 0, workers=1, progress=False)
    return root


LOGGERS = {
    "wandb": "LikeWandb",
    "mlflow": "LikeMlflow",
    "mlflow-local": "{class_path: LikeMlflow, init_args: {tracking_uri: 'file:mlruns'}}",
    "csv": "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: csv}}",
    "none": "false",
}


@pytest.mark.parametrize("name", LOGGERS)
def test_results_config_checkpoints_and_resuming_do_not_depend_on_the_logger(name, fixture_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = LOGGERS[name].replace("Like", f"{__name__}.Like")
    arguments = [
        "fit", f"--config={RECIPES / 'xpool.yaml'}", f"--config={RECIPES / 'fixture.yaml'}",
        f"--data.init_args.root={fixture_root}", "--data.init_args.batch_size=4", "--data.init_args.num_workers=0",
        "--data.init_args.frames=2", "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1",
        "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.log_every_n_steps=1",
        "--trainer.accelerator=cpu",
        "--model.init_args.encoder={class_path: TinyClipEncoder, init_args: "
        "{width: 64, text_layers: 1, vision_layers: 1}}", f"--trainer.logger={logger}",
    ]  # fmt: skip
    Stub.logged = LikeWandb.logged = LikeMlflow.logged = 0
    assert main(arguments) == 0
    run = tmp_path / "runs" / "xpool-msrvtt" / "version_0"
    made = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert made >= {"results.json", "results.csv", "config.yaml", "checkpoints/last.ckpt", "checkpoints/best.ckpt"}
    assert made >= {"metrics.csv", "log.txt", "run.md", "ranks.parquet"}
    assert LikeWandb.logged + LikeMlflow.logged > 0 or name in ("csv", "none")
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 1
    results = json.loads((run / "results.json").read_text())
    assert Path(results["weights"]["run"]) == Path("runs/xpool-msrvtt/version_0")
    before = (run / "results.json").stat().st_mtime_ns
    assert main([*arguments, "--checkpoints.resume=true"]) == 0
    assert (run / "results.json").stat().st_mtime_ns > before
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    elsewhere = {path.name for path in Path.cwd().iterdir()} - {"runs", "csv"}
    assert not elsewhere, f"beside the run's folder: {elsewhere}"
    assert main(["test", f"--ckpt_path={run}/checkpoints/last.ckpt", f"--trainer.logger={logger}"]) == 0
    assert (run / "test" / "version_0" / "results.json").is_file()
