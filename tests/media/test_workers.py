"""Worker processes end with the process they work for, however that ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tvr_lightning.media.workers import undisturbed

PROGRAM = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader
from tvr_lightning.media.workers import worker_context

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
    batches = iter(loader)
    found = {int(number) for batch in (next(batches), next(batches)) for number in batch}
    pool = ProcessPoolExecutor(2, mp_context=worker_context())
    found |= {number for pair in pool.map(numbers, range(2)) for number in pair}
    print(*found, flush=True)
    time.sleep(600)
"""
SERVER = """
import os, signal, time
from pathlib import Path
from tvr_lightning.media.workers import undisturbed, worker_context

def of_server():
    return [line for line in Path(f"/proc/{os.getppid()}/status").read_text().splitlines() if line.startswith("SigBlk")]

def say(answers):
    answers.put(of_server())

if __name__ == "__main__":
    start = worker_context()
    with undisturbed():
        answers = start.SimpleQueue()
        worker = start.Process(target=say, args=(answers,))
        worker.start()
    (line,) = answers.get()
    worker.join()
    print(bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1))
"""


def runs(process: int) -> bool:
    """Whether a process is there and not only waiting for its exit status to be read."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_no_worker_outlives_a_killed_process(number, tmp_path, ended):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    process = ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
    started = [int(word) for word in process.stdout.readline().split()]
    assert len(started) == 5, "two workers of each and the server they were forked from"
    assert all(runs(each) for each in started)
    os.kill(process.pid, number)
    process.wait()
    until = time.monotonic() + 60
    while any(runs(each) for each in started):
        assert time.monotonic() < until, "workers are still there after a minute"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_workers_server_never_takes_the_keyboards_signal(tmp_path):
    """Python 3.11 unblocks it when it starts its resource tracker, between our blocking it and the server's start."""
    (tmp_path / "program.py").write_text(SERVER)
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_an_interruption_waits_until_workers_are_started_whichever_thread_takes_it():
    """The keyboard's signal goes to any thread that does not hold it back; Python then interrupts the main one."""
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
