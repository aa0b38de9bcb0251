"""`metrics.csv`: what is logged, and what a run that goes on makes of it."""

import pandas as pd

from tvr_lightning.runs.curves import FILE, CurvesLogger


def test_a_run_that_goes_on_keeps_what_it_does_not_do_again(tmp_path):
    first = CurvesLogger(tmp_path / "run")
    for step in range(6):
        first.log_metrics({"train/loss": 10.0 - step, "epoch": step // 2}, step)
    with (tmp_path / "run" / FILE).open("a") as file:
        file.write("2,6,train/lo")  # as a kill leaves it
    again = CurvesLogger(tmp_path / "run")
    again.log_metrics({"epoch": 2}, 3)
    again.log_metrics({"train/loss": 1.0, "val/t2v_R@1": 50.0}, 4)
    found = pd.read_csv(tmp_path / "run" / FILE)
    assert found["value"].tolist() == [10.0, 9.0, 8.0, 7.0, 1.0, 50.0]
    assert found["step"].tolist() == [0, 1, 2, 3, 4, 4]
    assert found["epoch"].tolist() == [0, 0, 1, 1, 2, 2]
    assert found["name"].tolist()[-2:] == ["train/loss", "val/t2v_R@1"]
