"""The server under load while indexing processes and the server itself are killed."""

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from search_parts import find, write_clip

from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index

pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "serving.py"
WRITER = """
import sys, tvr_lightning, torch
torch.set_num_threads(1)
from tvr_lightning.search.indexing import index
print("ready", flush=True)
index([sys.argv[1]], sys.argv[2], batch_size=2, progress=False)
"""


@pytest.fixture(scope="module")
def serving():
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("serving_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.slow
def test_load_while_writers_are_killed_gives_no_error_and_no_leak(
    gallery, tmp_path, sources, port, serving, capsys, ended
):
    folder, out = tmp_path / "videos", tmp_path / "index"
    shutil.copytree(gallery, folder)
    index([folder], out, sources[1:], progress=False)
    options = ["--index", str(out), "--seconds", "8", "--port", str(port)]
    command = [sys.executable, str(BENCHMARK), *options]
    load = ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
    kills = 0
    while load.poll() is None and kills < 3:
        write_clip(folder / f"more{kills}.mp4", 40 + kills)
        command = [sys.executable, "-c", WRITER, str(folder), str(out)]
        writer = ended(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        kills += 1
    printed, _ = load.communicate()
    with capsys.disabled():
        print(f"\n{printed}")
    assert load.returncode == 0, printed
    assert kills
    assert index([], out, progress=False).total == 8 + kills


@pytest.mark.slow
def test_a_server_killed_under_load_leaves_the_index_as_it_was(indexed, port, serving, ended):
    with Searcher(indexed) as searcher:
        before = find(searcher, "a red square")
    for _ in range(2):
        server = ended(serving.start(indexed, port))
        took, statuses = [], Counter()
        until = time.monotonic() + 600
        clients = [
            threading.Thread(target=serving.client, args=(port, until, took, statuses, number)) for number in range(4)
        ]
        for client in clients:
            client.start()
        while len(took) < 20:
            time.sleep(0.05)
        server.kill()
        for client in clients:
            client.join()
        server.wait()
        assert {status for _, status in statuses} == {0, 200}, "connections break off, and no answer is a wrong one"
    with Searcher(indexed) as searcher:
        assert find(searcher, "a red square") == before
