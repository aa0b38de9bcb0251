"""LanceDB tables with an index: exact within the limit, fewer comparisons beyond it, and up to date."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch
from torch.nn.functional import normalize

pytest.importorskip("lancedb", reason="the extra `search` is not installed")
from tvr_lightning.search import vectors as stores
from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.indexing import index
from tvr_lightning.search.vectors import LanceStore, open_vectors, update_vectors

ROWS, WIDTH, PARTITION = 2000, 32, 100


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


def test_an_indexed_table_is_searched_exactly_up_to_the_limit(store):
    made, vectors = store
    for row in (0, 7, 1999):
        query = normalize(vectors[row] + 0.1 * vectors[row - 1], dim=0)
        found = made.nearest(query, 50)
        assert {key for key, _ in found} == set(expected(vectors, query, 50))
        assert [key for key, _ in found][:5] == expected(vectors, query, 5)
        assert found[0][1] == pytest.approx(float((vectors @ query).max()), abs=1e-5)


def test_beyond_the_limit_the_nearest_partitions_are_searched(store, monkeypatch):
    made, vectors = store
    monkeypatch.setattr(stores, "MOST_COMPARED", 2 * PARTITION)
    found = {key for key, _ in made.nearest(vectors[3], 50)}
    assert 3 in found, "a vector is in the partition with the nearest center"
    assert 5 < len(found & set(expected(vectors, vectors[3], 50))) < 50, "neighbours in other partitions are missed"


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


def test_a_table_whose_making_was_killed_is_made_again(gallery, sources, tmp_path):
    out = tmp_path / "index"
    Catalog(out, create=True).close()
    (out / "vectors.lance" / "videos.lance" / "data").mkdir(parents=True)
    assert LanceStore(str(out / "vectors.lance")).nearest(torch.ones(4), 3) == [], (
        "who searches meanwhile finds nothing"
    )
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


def test_kills_while_the_table_is_made_cost_nothing(gallery, sources, tmp_path, ended):
    out = tmp_path / "index"
    index([gallery], out, sources[1:], progress=False)
    shutil.rmtree(out / "vectors.lance")
    command = [sys.executable, "-c", FOLLOWING, str(out)]
    table = out / "vectors.lance" / "videos.lance"
    for delay in (0.0, 0.002, 0.01):
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
        table.rename(tmp_path / f"made-{delay}")
