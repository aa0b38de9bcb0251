"""LanceDB tables with an index, and kills of writers and servers."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch
from search_parts import find, write_clip
from torch.nn.functional import normalize

from tvr_lightning.search import vectors as stores
from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.vectors import LanceStore, open_vectors, update_vectors

ROWS, WIDTH, PARTITION = 2000, 32, 100
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "serving.py"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store whose limits are small enough for a test, with its vectors."""
    monkeypatch.setattr(stores, "ROWS_FOR_AN_INDEX", ROWS)
    monkeypatch.setattr(stores, "ROWS_PER_PARTITION", PARTITION)
    made = LanceStore(str(tmp_path / "vectors"))
    vectors = normalize(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)), dim=1)
    made.add(range(ROWS - 1), vectors[:-1])
    made.finish()
    assert not made._open().list_indices(), "one row below the limit"
    made.add([ROWS - 1], vectors[-1:])
    made.finish()
    assert len(made._open().list_indices()) == 1
    return made, vectors


def expected(vectors, query, count):
    return (vectors @ query).topk(count).indices.tolist()


def test_an_indexed_table_is_searched_exactly_up_to_the_limit(store, monkeypatch):
    made, vectors = store
    for row in (0, 7, 1999):
        query = normalize(vectors[row] + 0.1 * vectors[row - 1], dim=0)
        found = made.nearest(query, 50)
        assert {key for key, _ in found} == set(expected(vectors, query, 50))
        assert [key for key, _ in found][:5] == expected(vectors, query, 5)
        assert found[0][1] == pytest.approx(float((vectors @ query).max()), abs=1e-5)
    monkeypatch.setattr(stores, "MOST_COMPARED", 2 * PARTITION)
    found = {key for key, _ in made.nearest(vectors[3], 50)}
    assert 3 in found, "a vector is in the partition with the nearest center"
    assert 5 < len(found & set(expected(vectors, vectors[3], 50))) < 50, "neighbors in other partitions are missed"


def test_an_indexed_table_follows_what_is_added_and_removed(store):
    made, vectors = store
    new = normalize(torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(1)), dim=1)
    made.add(range(5000, 5300), new)
    made.remove(range(10))
    for _ in range(2):  # before the index knows of them, and after
        assert made.nearest(new[7], 1)[0][0] == 5007
        assert made.nearest(vectors[3], 1)[0][0] != 3
        assert made.keys() == set(range(10, ROWS)) | set(range(5000, 5300))
        made.finish()


def test_a_table_whose_creation_was_killed_is_created_again(gallery, sources, tmp_path):
    out = tmp_path / "index"
    Catalog(out, create=True).close()
    (out / "vectors.lance" / "videos.lance" / "data").mkdir(parents=True)
    store = LanceStore(str(out / "vectors.lance"))
    assert store.nearest(torch.ones(4), 3) == [], "a search meanwhile finds nothing"
    assert index([gallery], out, sources[1:], "lancedb", progress=False).total == 8
    with closing(Catalog(out)) as catalog:
        assert open_vectors(catalog).keys() == catalog.keys()


FOLLOWING = """
import sys
from contextlib import closing
from pathlib import Path
from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.vectors import update_vectors, open_vectors
with closing(Catalog(Path(sys.argv[1]))) as catalog:
    store = open_vectors(catalog)
    print("ready", flush=True)
    sys.stdin.readline()
    update_vectors(store, catalog)
"""


@pytest.mark.parametrize(
    "delay", [0.002, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(0.01, marks=pytest.mark.slow)]
)
def test_kills_while_the_table_is_created_cost_nothing(indexed, tmp_path, ended, delay):
    out = shutil.copytree(indexed, tmp_path / "index")
    shutil.rmtree(out / "vectors.lance")
    table = out / "vectors.lance" / "videos.lance"
    command = [sys.executable, "-c", FOLLOWING, str(out)]
    process = ended(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    process.stdout.readline()
    process.stdin.write(b"go\n")
    process.stdin.flush()
    while not table.exists() and process.poll() is None:
        os.sched_yield()
    time.sleep(delay)
    process.kill()
    process.wait()
    with closing(Catalog(out)) as catalog, closing(open_vectors(catalog)) as store:
        update_vectors(store, catalog)
        assert store.keys() == catalog.keys()


WRITER = """
import sys, tvr_lightning, torch
torch.set_num_threads(1)
from tvr_lightning.search.indexing import index
print("ready", flush=True)
index([sys.argv[1]], sys.argv[2], batch_size=2, progress=False)
"""


@pytest.fixture
def port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.slow
def test_load_while_writers_are_killed_gives_no_error_and_no_leak(gallery, tmp_path, sources, port, ended):
    folder, out = shutil.copytree(gallery, tmp_path / "videos"), tmp_path / "index"
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
    assert load.returncode == 0, printed
    assert kills
    assert index([], out, progress=False).total == 8 + kills


@pytest.mark.slow
def test_a_server_killed_under_load_leaves_the_index_unchanged(indexed, port, ended):
    spec = importlib.util.spec_from_file_location("serving_benchmark", BENCHMARK)
    serving = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serving)
    with Searcher(indexed) as searcher:
        before = find(searcher, "a red square")
    for _ in range(2):
        server = ended(serving.start(indexed, port))
        took, statuses = [], Counter()
        given = (port, time.monotonic() + 600, took, statuses)
        clients = [threading.Thread(target=serving.client, args=(*given, number)) for number in range(4)]
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
