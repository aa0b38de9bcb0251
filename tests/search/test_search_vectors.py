"""LanceDB tables with an index, and kills of writers and servers."""

import importlib.util
import os
import shutil
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
from tvr_lightning.search.vectors import LanceStore, update_vectors

ROWS, WIDTH, PARTITION = 2000, 32, 100
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "serving.py"


def random_vectors(count, seed):
    return normalize(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=1)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with an index, whose limits are small enough for a test, and its vectors."""
    monkeypatch.setattr(stores, "ROWS_FOR_AN_INDEX", ROWS)
    monkeypatch.setattr(stores, "ROWS_PER_PARTITION", PARTITION)
    store, vectors = LanceStore(tmp_path / "vectors"), random_vectors(ROWS, 0)
    for rows, indices in ((range(ROWS - 1), 0), (range(ROWS - 1, ROWS), 1)):
        store.add(rows, vectors[rows.start : rows.stop])
        store.finish()
        assert len(store._open().list_indices()) == indices
    return store, vectors


def test_an_indexed_table_is_searched_exactly_up_to_the_limit(store, monkeypatch):
    store, vectors = store
    for row in (0, 7, 1999):
        query = normalize(vectors[row] + 0.1 * vectors[row - 1], dim=0)
        best, found = (vectors @ query).topk(50), store.nearest(query, 50)
        assert {key for key, _ in found} == set(best.indices.tolist())
        assert [key for key, _ in found][:5] == best.indices[:5].tolist()
        assert found[0][1] == pytest.approx(float(best.values[0]), abs=1e-5)
    monkeypatch.setattr(stores, "MOST_COMPARED", 2 * PARTITION)
    found = {key for key, _ in store.nearest(vectors[3], 50)}
    assert 3 in found, "a vector is in the partition with the nearest center"
    exact = set((vectors @ vectors[3]).topk(50).indices.tolist())
    assert 5 < len(found & exact) < 50, "neighbors in other partitions are missed"


def test_an_indexed_table_reflects_added_and_removed_vectors(store):
    store, vectors = store
    new = random_vectors(300, 1)
    store.add(range(5000, 5300), new)
    store.remove(range(10))
    for _ in range(2):  # before the index contains the changes, and after
        assert store.nearest(new[7], 1)[0][0] == 5007
        assert store.nearest(vectors[3], 1)[0][0] != 3
        assert store.keys() == set(range(10, ROWS)) | set(range(5000, 5300))
        store.finish()


def assert_catches_up(out):
    with closing(Catalog(out)) as catalog:
        store = LanceStore(out)
        update_vectors(store, catalog)
        assert store.keys() == catalog.keys()


def test_a_table_whose_creation_was_killed_is_created_again(indexed, tmp_path):
    out = shutil.copytree(indexed, tmp_path / "index")
    shutil.rmtree(out / "vectors.lance")
    (out / "vectors.lance" / "videos.lance" / "data").mkdir(parents=True)
    assert LanceStore(out).nearest(torch.ones(4), 3) == []
    assert_catches_up(out)


@pytest.mark.parametrize("delay", [0.002, pytest.param(0.01, marks=pytest.mark.slow)])
def test_a_kill_while_the_table_is_created_loses_nothing(indexed, tmp_path, interpreter, delay):
    out = shutil.copytree(indexed, tmp_path / "index")
    shutil.rmtree(out / "vectors.lance")
    process = interpreter(
        "from pathlib import Path; from tvr_lightning.search.vectors import LanceStore, update_vectors\n"
        "from tvr_lightning.search.catalog import Catalog\n"
        f"catalog = Catalog(Path({str(out)!r})); update_vectors(LanceStore(catalog.folder), catalog)"
    )
    while not (out / "vectors.lance" / "videos.lance").exists() and process.is_alive():
        os.sched_yield()
    time.sleep(delay)
    process.kill()
    process.join()
    assert_catches_up(out)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_a_loaded_server_reports_no_error_and_no_leak_while_writers_are_killed(
    indexed, gallery, tmp_path, interpreter, ended
):
    folder, out = shutil.copytree(gallery, tmp_path / "videos"), shutil.copytree(indexed, tmp_path / "index")
    index([folder], out, progress=False)
    command = [sys.executable, str(BENCHMARK), "--index", str(out), "--seconds", "8", "--port", str(free_port())]
    load = ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
    kills = 0
    while load.poll() is None and kills < 3:
        write_clip(folder / f"more{kills}.mp4", 40 + kills)
        ready = tmp_path / f"ready{kills}"
        writer = interpreter(
            "from pathlib import Path; from tvr_lightning.search.indexing import index\n"
            f"Path({str(ready)!r}).touch(); index([{str(folder)!r}], {str(out)!r}, batch_size=2, progress=False)"
        )
        while not ready.exists():
            time.sleep(0.01)
        writer.kill()
        writer.join()
        kills += 1
    printed, _ = load.communicate()
    assert load.returncode == 0, printed
    assert kills
    assert index([], out, progress=False).total == 16 + kills


@pytest.mark.slow
def test_a_server_killed_under_load_leaves_the_index_unchanged(indexed, ended):
    spec = importlib.util.spec_from_file_location("serving_benchmark", BENCHMARK)
    serving = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serving)
    with Searcher(indexed) as searcher:
        before = find(searcher, "a red square")
    port = free_port()
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
    assert {status for _, status in statuses} == {0, 200}, "connections break off, but no answer is wrong"
    with Searcher(indexed) as searcher:
        assert find(searcher, "a red square") == before
