"""The bar of a run says how long the whole run still takes, and counts epochs as people do."""

import re
from pathlib import Path

from lightning.pytorch import Callback, Trainer

from tvr_lightning.runs.progress_report import ProgressReport, RunProgressBar, print_progress
from tvr_lightning.testing.small import small

RECIPE = Path(__file__).parents[2] / "recipes" / "clip4clip.yaml"


class Seen(Callback):
    """What the bar would show after every step."""

    def __init__(self, bar):
        self.bar, self.metrics, self.descriptions, self.seconds = bar, [], [], []

    def on_train_batch_end(self, trainer, module, *arguments):
        self.metrics.append(self.bar.get_metrics(trainer, module))
        self.descriptions.append(self.bar._get_train_description(trainer.current_epoch).strip())
        self.seconds.append(self.bar._left.seconds(trainer))


def test_the_time_left_is_that_of_the_whole_run_and_ends_at_nothing(tmp_path):
    method, data = small(RECIPE)
    bar = RunProgressBar()
    seen = Seen(bar)
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, limit_train_batches=3, limit_val_batches=0, callbacks=[bar, seen],
        logger=False, enable_checkpointing=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(method, datamodule=data)
    assert seen.descriptions == ["Epoch 1/2"] * 3 + ["Epoch 2/2"] * 3
    assert seen.seconds[0] is None, "one step says nothing of how long one takes"
    assert "run left" not in seen.metrics[0]
    assert all(left > 0 for left in seen.seconds[1:-1])
    assert seen.seconds[-1] == 0
    assert seen.metrics[-1]["run left"] == "0:00:00"
    assert "v_num" not in seen.metrics[-1]


def test_without_a_terminal_lines_say_what_is_done(capsys):
    method, data = small(RECIPE)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=3, limit_val_batches=1, logger=False,
        callbacks=[ProgressReport(print_progress, 0.0)], enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False, use_distributed_sampler=False, num_sanity_val_steps=0, check_val_every_n_epoch=1,
    )  # fmt: skip
    trainer.fit(method, datamodule=data)
    trainer.test(method, datamodule=data, verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert "Epoch 1/1, step 1 of 3" in lines
    assert any(re.fullmatch(r"Epoch 1/1, step 2 of 3, 0:00:\d\d left of the run", line) for line in lines)
    assert any(line.startswith("validate, batch 1 of 1") for line in lines)
    assert "test, batch 1 of 3" in lines


def test_reports_are_some_time_apart(capsys):
    report = ProgressReport(print_progress, 60.0)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=3, limit_val_batches=0, logger=False, callbacks=[report],
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    method, data = small(RECIPE)
    trainer.fit(method, datamodule=data)
    assert [line for line in capsys.readouterr().out.splitlines() if "step" in line] == ["Epoch 1/1, step 1 of 3"]
