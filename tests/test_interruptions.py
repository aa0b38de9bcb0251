"""Ctrl-C ends every verb in one sentence and exit status 130, and says how to go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest

from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parent.parent / "recipes"
SECONDS = 500  # most of it is imports, on a busy machine
LOOKING = 4  # the verb, the server of its workers, what tracks their resources, and a worker


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    synthesize("msrvtt", root, 40, 0, workers=1, progress=False)
    return root


def forked_and_interrupted(words: list[str], folder: Path, begun, ended) -> tuple[int, str]:
    """As `interrupted`, of a process that has nothing to import."""
    process = ended(forked.started(words, folder))
    end = time.monotonic() + SECONDS
    while not begun(process.pid) and process.is_alive() and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    process.join(SECONDS)
    return process.exitcode, (folder / "err-0.txt").read_text(encoding="utf-8")


def interrupted(words: list[str], begun, ended) -> tuple[int, str]:
    """Run a verb, press Ctrl-C once `begun` is true, and return its exit status and what it said as errors."""
    command = [sys.executable, "-m", "tvr_lightning.cli", *words]
    process = ended(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    )
    end = time.monotonic() + SECONDS
    while not begun(process.pid) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group, workers included
    error = process.communicate(timeout=SECONDS)[1]
    return process.returncode, error


def processes(group: int) -> int:
    """Count the processes of a group."""
    found = subprocess.run(["ps", "-eo", "pgid="], capture_output=True, text=True, check=True).stdout.split()
    return found.count(str(group))


def options(root: Path) -> list[str]:
    return [
        f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={RECIPES / 'fixture.yaml'}",
        f"--data.init_args.root={root}",
    ]  # fmt: skip


def test_an_interrupted_extraction_ends_in_a_sentence(root, tmp_path, ended):
    here = tmp_path / "here.yaml"
    here.write_text(f"data: {{init_args: {{root: {root}}}}}\n")
    out = tmp_path / "features"
    words = ["extract", *options(root)[:2], f"--config={here}", f"--out={out}", "--batch_size=1", "--num_workers=2"]
    status, error = forked_and_interrupted(
        words, tmp_path, lambda pid: out.is_dir() and any(out.rglob("*.safetensors")), ended
    )
    assert status == 130, error
    assert "Traceback" not in error
    assert error.splitlines()[-1] == "tvr: extract was interrupted; rerun the command to resume"


def test_an_interrupted_training_ends_in_a_sentence(root, tmp_path, ended):
    more = ["--data.init_args.batch_size=4", "--trainer.max_epochs=1000", f"--results.directory={tmp_path}"]
    words = ["fit", *options(root), *more, "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"]
    status, error = interrupted(words, lambda pid: any(tmp_path.rglob("last.ckpt")), ended)
    assert status == 130, error
    assert "Traceback" not in error
    assert error.splitlines()[-1].startswith("tvr: fit was interrupted; rerun the command with --check")


def test_an_interrupted_look_at_the_videos_ends_in_a_sentence(root, tmp_path, ended):
    here = tmp_path / "here.yaml"
    here.write_text(f"data: {{init_args: {{root: {root}}}}}\n")
    words = [
        "data",
        "check",
        f"--config={RECIPES / 'clip4clip.yaml'}",
        f"--config={here}",
        "--decode",
        "--num_workers=2",
    ]
    status, error = forked_and_interrupted(words, tmp_path, lambda pid: processes(pid) >= LOOKING, ended)
    assert status == 130, error
    assert "Traceback" not in error
    assert error.splitlines()[-1] == "tvr: data check was interrupted"
