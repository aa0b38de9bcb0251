"""`metrics.csv`: what is logged, and what a run that goes on makes of it."""

import pandas as pd
import pytest

from tvr_lightning.runs.folder import METRICS, metrics_logger
from tvr_lightning.runs.resume import AtomicCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")  # commands filter it


def test_a_run_that_goes_on_keeps_what_it_does_not_do_again(tmp_path):
    run, checkpoint = tmp_path / "run", tmp_path / "running.ckpt"
    first = metrics_logger(run)
    for step in range(6):
        first.log_metrics({"train/loss": 10.0 - step, "epoch": step // 2}, step)
    with (run / METRICS).open("a") as file:
        file.write("2,")  # as a kill leaves it
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


def test_a_new_run_begins_with_an_empty_log(tmp_path):
    for value in (1.0, 2.0):
        metrics_logger(tmp_path).log_metrics({"train/loss": value}, 0)
    assert pd.read_csv(tmp_path / METRICS)["train/loss"].tolist() == [2.0]
