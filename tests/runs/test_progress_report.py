"""Progress of a run, and the remaining time of the entire run."""

import re
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback

from tvr_lightning.runs.progress_report import ProgressReport, RunProgressBar, print_progress
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import small

RECIPE = Path(__file__).parents[2] / "recipes" / "clip4clip.yaml"


def test_the_bar_shows_the_remaining_time_of_the_whole_run():
    method, data = small(RECIPE)
    bar, metrics, descriptions, seconds = RunProgressBar(), [], [], []

    def note(trainer, module, *batch):
        metrics.append(bar.get_metrics(trainer, module))
        descriptions.append(bar._get_train_description(trainer.current_epoch).strip())
        seconds.append(bar._left.seconds(trainer))

    trainer = Trainer(
        accelerator="cpu", max_epochs=2, limit_train_batches=2, limit_val_batches=0, logger=False,
        callbacks=[bar, LambdaCallback(on_train_batch_end=note)], enable_checkpointing=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(method, datamodule=data)
    assert descriptions == ["Epoch 1/2"] * 2 + ["Epoch 2/2"] * 2
    assert seconds[0] is None, "one step is not enough to estimate the time of a step"
    assert "run left" not in metrics[0]
    assert all(left > 0 for left in seconds[1:-1])
    assert seconds[-1] == 0
    assert metrics[-1]["run left"] == "0:00:00"
    assert "v_num" not in metrics[-1]


def test_without_a_terminal_lines_report_progress_at_intervals(capsys):
    method, data = small(RECIPE)
    options = {"max_epochs": 1, "limit_train_batches": 3, "check_val_every_n_epoch": 1}
    trainer = quiet_trainer(**options, limit_val_batches=1, callbacks=[ProgressReport(print_progress, 0.0)])
    trainer.fit(method, datamodule=data)
    trainer.test(method, datamodule=data, verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert "Epoch 1/1, step 1 of 3" in lines
    assert any(re.fullmatch(r"Epoch 1/1, step 2 of 3, 0:00:\d\d left of the run", line) for line in lines)
    assert any(line.startswith("validate, batch 1 of 1") for line in lines)
    assert "test, batch 1 of 2" in lines
    rare = quiet_trainer(**options, limit_val_batches=0, callbacks=[ProgressReport(print_progress, 60.0)])
    rare.fit(method, datamodule=data)
    assert [line for line in capsys.readouterr().out.splitlines() if "step" in line] == ["Epoch 1/1, step 1 of 3"]
