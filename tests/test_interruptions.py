"""Ctrl-C ends every command with one line, which explains how to resume, and exit status 130."""

import os
import signal
import subprocess
import time
from pathlib import Path

import forked
import pytest
from small_run import small_run

SECONDS = 500  # for a busy machine
WITH_A_WORKER = 4  # processes: the command, the server of its workers, the tracker of their resources, and a worker


@pytest.fixture
def interrupt(tmp_path, ended):
    """Run a command, press Ctrl-C once `begun` is true, and return the last line of its errors."""

    def run(words: list[str], begun) -> str:
        process = ended(forked.started(words, tmp_path))
        end = time.monotonic() + SECONDS
        while not begun(process.pid) and process.is_alive() and time.monotonic() < end:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group, workers included
        process.join(SECONDS)
        error = (tmp_path / "err-0.txt").read_text(encoding="utf-8")
        assert process.exitcode == 130, error
        assert "Traceback" not in error
        return error.splitlines()[-1]

    return run


def processes(group: int) -> int:
    """Count the processes of a group."""
    found = subprocess.run(["ps", "-eo", "pgid="], capture_output=True, text=True, check=True).stdout.split()
    return found.count(str(group))


@pytest.fixture
def recipe(synthetic) -> list[str]:
    return ["--config=clip4clip", "--config=fixture", f"--data.init_args.root={synthetic('msrvtt', 40)}"]


def test_an_interrupted_extraction_can_be_resumed(recipe, tmp_path, interrupt):
    out: Path = tmp_path / "features"
    words = ["extract", *recipe, f"--out={out}", "--batch_size=1", "--num_workers=2"]
    line = interrupt(words, lambda pid: out.is_dir() and any(out.rglob("*.safetensors")))
    assert line == "tvr: extract was interrupted; rerun the command to resume"


def test_an_interrupted_training_can_be_resumed(msrvtt, tmp_path, interrupt):
    words = ["fit", *small_run(msrvtt, tmp_path, "--trainer.max_epochs=1000")]
    line = interrupt(words, lambda pid: any(tmp_path.rglob("last.ckpt")))
    assert line.startswith("tvr: fit was interrupted; rerun the command with --check")


def test_an_interrupted_check_of_videos_ends_in_one_line(recipe, interrupt):
    words = ["data", "check", *recipe, "--decode", "--num_workers=2"]
    assert interrupt(words, lambda pid: processes(pid) >= WITH_A_WORKER) == "tvr: data check was interrupted"
