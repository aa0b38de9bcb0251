"""Worker processes end with their parent process and are not disturbed by Ctrl+C."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from child_processes import until

from tvr_lightning.errors import UserError
from tvr_lightning.media.workers import batches_of, undisturbed

PROGRAM = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader
from tvr_lightning.media.workers import undisturbed, worker_context

class Numbers:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return os.getpid(), os.getppid()

def numbers(_):
    time.sleep(1)
    return os.getpid(), os.getppid()

if __name__ == "__main__":
    loader = DataLoader(Numbers(), batch_size=1, num_workers=2, multiprocessing_context=worker_context())
    with undisturbed():
        batches = iter(loader)
    found = {int(number) for batch in (next(batches), next(batches)) for number in batch}
    pool = ProcessPoolExecutor(2, mp_context=worker_context())
    found |= {number for pair in pool.map(numbers, range(2)) for number in pair}
    print(*found, flush=True)
    time.sleep(600)
"""


def runs(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_worker_outlives_a_killed_process(tmp_path, ended):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    process = ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
    started = [int(word) for word in process.stdout.readline().split()]
    assert len(started) == 5, "two workers of each and the server they were forked from"
    assert all(runs(each) for each in started)
    parents = {int(Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1]) for each in started}
    (server,) = parents & {*started}
    # Python 3.11 unblocks SIGINT when it starts its resource tracker, before the server starts.
    blocked = re.search(r"SigBlk:\s+(\w+)", Path(f"/proc/{server}/status").read_text())[1]
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1, "Ctrl+C interrupts the server of the workers"
    process.kill()
    process.wait()
    until(lambda: not any(runs(each) for each in started), 60)


def test_an_interruption_waits_until_the_workers_have_started():
    """The signal can reach any thread that does not block it; Python then interrupts the main thread."""
    ended, steps = threading.Event(), []
    other = threading.Thread(target=ended.wait)
    other.start()

    def start_workers() -> None:
        with undisturbed():
            signal.pthread_kill(other.ident, signal.SIGINT)
            for step in range(20):
                time.sleep(0.01)
                steps.append(step)

    try:
        with pytest.raises(KeyboardInterrupt):
            start_workers()
    finally:
        ended.set()
        other.join()
    assert len(steps) == 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), EOFError()])
def test_a_worker_that_dies_while_it_sends_a_batch_is_reported(error):
    def batches():
        yield "first"
        raise error

    received = batches_of(batches)
    assert next(received) == "first"
    with pytest.raises(UserError, match="worker exited unexpectedly"):
        next(received)
