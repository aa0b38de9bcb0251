"""A fault in the middle of a run ends it with a message and leaves the last checkpoint intact.

Ctrl-C ends a command with one line, which explains how to resume, and exit status 130.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import forked
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from resume_run import add_callback
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.runs.resume import AtomicCheckpointIO
from tvr_lightning.runs.run import Run

PROGRAM = Path(__file__).parent / "resume_run.py"
PATIENCE = 900  # seconds, on a busy machine


@pytest.fixture(autouse=True)
def time_limit():
    """Fail if a run hangs."""

    def give_up(number, frame):
        pytest.fail(f"the run did not end within {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fit(root, runs, *more):
    """Six steps of two pairs."""
    short = ("--data.init_args.batch_size=2", "--trainer.max_epochs=1", "--trainer.limit_val_batches=0")
    alone = "--model.init_args.released_devices=null"
    return ["fit", *small_run(root, runs, *short, alone, "--checkpoints.every_n_steps=1", *more)]


@pytest.fixture
def strike(monkeypatch):
    """Call a function before an optimizer step of the next run."""
    monkeypatch.setattr(Run, "build_trainer", Run.build_trainer)  # restored after the test

    def add(step, act):
        def before_step(trainer, module, optimizer):
            if trainer.global_step == step:
                trainer.strategy.checkpoint_io.teardown()  # running.ckpt is written before the fault
                act()

        add_callback(LambdaCallback(on_before_optimizer_step=before_step))

    return add


def saved_steps(runs):
    (path,) = runs.glob("*/*/checkpoints/running.ckpt")
    return torch.load(path, weights_only=True)["global_step"]


def test_a_video_that_breaks_in_the_middle_of_an_epoch_is_named(own_data, tmp_path, strike, capsys):
    def damage():
        for path in own_data.rglob("*.mp4"):
            path.write_bytes(path.read_bytes()[:100])

    strike(1, damage)
    assert main(fit(own_data, tmp_path / "runs")) == 2
    error = capsys.readouterr().err
    assert ".mp4" in error
    assert "Traceback" not in error
    assert saved_steps(tmp_path / "runs") == 2


def test_a_killed_data_worker_is_reported(own_data, tmp_path, strike, capsys):
    strike(0, lambda: os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL))
    assert main(fit(own_data, tmp_path / "runs", "--data.init_args.num_workers=1")) == 2
    assert "memory ran out. Use fewer workers (data.init_args.num_workers" in capsys.readouterr().err
    assert saved_steps(tmp_path / "runs") >= 1


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(own_data, tmp_path, strike, limit_files, capsys):
    strike(2, lambda: limit_files(1 << 17))
    assert main(fit(own_data, tmp_path / "runs")) == 2
    assert "running.ckpt could not be written" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.writing"))
    assert saved_steps(tmp_path / "runs") == 2


def test_a_disk_that_is_full_from_the_start_is_reported_in_one_line(own_data, tmp_path, limit_files, capsys):
    limit_files(1 << 11)
    assert main(fit(own_data, tmp_path / "runs")) == 2
    assert "could not be written (File too large). Free disk space" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_the_death_of_one_process_ends_the_others(dead, own_data, tmp_path):
    more = ("--trainer.devices=2", "--trainer.strategy=ddp")
    command = [sys.executable, str(PROGRAM), "SIGKILL", "1", *fit(own_data, tmp_path / "runs", *more)]
    environment = os.environ | {"STRIKE_RANK": str(dead)}
    # The pipes are open as long as one of them lives.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert ended.returncode != 0
    output = ended.stdout + ended.stderr
    # Which of them depends on what notices first: the launcher, or the other process in its next exchange.
    assert "Another of the 2 processes of this run ended" in output or (dead == 1 and "terminated with code" in output)
    assert "Traceback" not in output
    assert saved_steps(tmp_path / "runs") == 1


@pytest.fixture
def interrupt(tmp_path, ended):
    """Run a command, press Ctrl-C once a file of a pattern exists, and return the last line of its errors."""

    def run(words, pattern):
        process = ended(forked.started(words, tmp_path))
        end = time.monotonic() + PATIENCE
        while not any(tmp_path.rglob(pattern)) and process.is_alive() and time.monotonic() < end:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group, workers included
        process.join(PATIENCE)
        error = (tmp_path / "err-0.txt").read_text(encoding="utf-8")
        assert process.exitcode == 130, error
        assert "Traceback" not in error
        return error.splitlines()[-1]

    return run


def test_an_interrupted_extraction_can_be_resumed(synthetic, tmp_path, interrupt):
    recipe = ["--config=clip4clip", "--config=fixture", f"--data.init_args.root={synthetic('msrvtt', 28)}"]
    words = ["extract", *recipe, f"--out={tmp_path / 'features'}", "--batch_size=1", "--num_workers=2"]
    assert interrupt(words, "*.safetensors") == "tvr: extract was interrupted; rerun the command to resume"


def test_an_interrupted_training_can_be_resumed(msrvtt, tmp_path, interrupt):
    words = ["fit", *small_run(msrvtt, tmp_path, "--trainer.max_epochs=1000")]
    assert interrupt(words, "last.ckpt").startswith("tvr: fit was interrupted; rerun the command with --check")


def test_a_command_without_a_way_to_resume_only_names_itself(monkeypatch, capsys):
    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr("tvr_lightning.reproduce.published.published_rows", interrupted)
    assert main(["published"]) == 130
    assert capsys.readouterr().err == "tvr: published was interrupted\n"


def test_an_interrupt_waits_until_a_checkpoint_is_written(tmp_path):
    class Interrupting:
        def __reduce__(self):
            signal.raise_signal(signal.SIGINT)
            return OrderedDict, ()

    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"state": Interrupting()}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt")["state"] == {}
