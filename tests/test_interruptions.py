"""Ctrl-C ends a command with one line, which explains how to resume, and exit status 130."""

import os
import signal
import time
from collections import OrderedDict

import forked
import pytest
import torch
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.runs.resume import AtomicCheckpointIO

SECONDS = 500  # for a busy machine


@pytest.fixture
def interrupt(tmp_path, ended):
    """Run a command, press Ctrl-C once a file of a pattern exists, and return the last line of its errors."""

    def run(words, pattern):
        process = ended(forked.started(words, tmp_path))
        end = time.monotonic() + SECONDS
        while not any(tmp_path.rglob(pattern)) and process.is_alive() and time.monotonic() < end:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group, workers included
        process.join(SECONDS)
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
