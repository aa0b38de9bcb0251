"""The suite runs in the background, where a shell has it ignore SIGINT, and leaves no process behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAILING = """
import signal, subprocess, sys, time
from pathlib import Path

CHILD = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"

def test_that_fails(ended, tmp_path):
    command = [sys.executable, "-c", CHILD]
    process = ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
    Path("processes.txt").write_text(f"{process.pid} {process.stdout.readline()}")
    asked = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    print("restored:", subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout)
    raise ValueError("meant to fail")
"""


def runs(process: int) -> bool:
    """Whether a process exists and is not only waiting for its exit status to be read."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
def test_a_failing_test_in_the_background_ends_its_processes_and_restores_sigint(tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "test_failing.py"]
    tests = Path(__file__).parent
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "ValueError: meant to fail" in done.stdout, done.stdout + done.stderr
    assert "restored: True" in done.stdout
    processes = [int(word) for word in (tmp_path / "processes.txt").read_text().split()]
    assert len(processes) == 2
    end = time.monotonic() + 10
    while any(map(runs, processes)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(runs, processes))
