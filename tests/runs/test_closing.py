"""The table after training, the checkpoint that it names, and the description of both are of the same weights."""

import json

import pandas as pd
import pytest
import torch
from small_run import small_run

from tvr_lightning.cli import main

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
