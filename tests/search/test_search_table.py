"""Large tables, kills of writers and servers, an index in an object store, and one that the actors of Ray make.

The server of the object store runs on this machine.
"""

import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import boto3
import pytest
import torch
from child_processes import until
from moto.server import ThreadedMotoServer
from search_parts import client_of, find, write_clip
from torch.nn.functional import normalize

from tvr_lightning.cli import main
from tvr_lightning.search import table as tables
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import UnreadableError
from tvr_lightning.search.indexing import index
from tvr_lightning.search.table import IndexTable

ROWS, WIDTH, PARTITION = 2000, 32, 100
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "serving.py"


def random_vectors(count, seed):
    return normalize(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=1)


def rows_of(numbers, vectors):
    """Rows of videos that have only a vector."""
    return [
        {"id": f"{number:016x}", "place": 0, "key": number, "path": f"/videos/{number}", "vector": vector}
        for number, vector in zip(numbers, vectors.numpy(), strict=True)
    ]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table with indices, whose limits are small enough for a test, and its vectors."""
    monkeypatch.setattr(tables, "ROWS_FOR_AN_INDEX", ROWS)
    monkeypatch.setattr(tables, "ROWS_PER_PARTITION", PARTITION)
    monkeypatch.setattr(tables, "KEPT", timedelta(seconds=0.1))
    table, vectors = IndexTable(tmp_path / "index", create=True), random_vectors(ROWS, 0)
    table.set_fact("scorers", [])
    for rows, indices in ((range(ROWS - 1), 0), (range(ROWS - 1, ROWS), 4)):
        table.commit(rows_of(rows, vectors[rows.start : rows.stop]))
        table.optimize(finish=True)
        assert len(table._table.list_indices()) == indices
    return table, vectors


def test_an_indexed_table_is_searched_exactly_up_to_the_limit(table, monkeypatch):
    table, vectors = table
    for row in (0, 7, 1999):
        query = normalize(vectors[row] + 0.1 * vectors[row - 1], dim=0)
        best, found = (vectors @ query).topk(50), table.nearest(query, 50)
        assert [span.key for span in found] == best.indices.tolist()
        assert torch.equal(found[0].vector, vectors[row])
    monkeypatch.setattr(tables, "MOST_COMPARED", 2 * PARTITION)
    found = {span.key for span in table.nearest(vectors[3], 50)}
    assert 3 in found, "a vector is in the partition with the nearest center"
    exact = set((vectors @ vectors[3]).topk(50).indices.tolist())
    assert 5 < len(found & exact) < 50, "neighbors in other partitions are missed"


def test_an_indexed_table_reflects_added_and_removed_videos(table):
    table, vectors = table
    new = random_vectors(300, 1)
    table.commit(rows_of(range(5000, 5300), new))
    table.commit([], [f"{number:016x}" for number in range(10)])
    for _ in range(2):  # before the index contains the changes, and after
        assert table.nearest(new[7], 1)[0].key == 5007
        assert table.nearest(vectors[3], 1)[0].key != 3
        assert set(table.keys()) == set(range(10, ROWS)) | set(range(5000, 5300))
        table.optimize(finish=True)


def test_a_replaced_video_is_one_version_without_rows_of_the_old_one(table):
    table, vectors = table
    before = table.generation()
    longer = [row | {"id": "a" * 16, "place": place} for place, row in enumerate(rows_of([1, 2, 3], vectors[:3]))]
    table.commit(longer)
    table.commit([longer[0] | {"key": 7}], ["a" * 16])
    assert table.generation() == before + 2
    assert [span.key for span in table.spans("a" * 16)] == [7]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_a_loaded_server_reports_no_error_while_writers_are_killed(indexed, gallery, tmp_path, interpreter, ended):
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


@pytest.fixture
def bucket(monkeypatch):
    """Address of an empty bucket."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT": address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=address).create_bucket(Bucket="videos")
    yield "s3://videos"
    server.stop()


def test_an_index_in_a_bucket_is_updated_searched_and_served(bucket, tmp_path, small_index, gallery, ckpt, capsys):
    address = f"{bucket}/some/index"
    assert main(["index", str(gallery), "--out", address, *ckpt]) == 0
    assert f'Next: tvr search "a query" --index {address}' in capsys.readouterr().out
    with Searcher(small_index) as local:
        expected = [(r.id, r.score) for r in find(local, "a red square").results]
    assert main(["search", "a red square", "--index", address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [r["id"] for r in found] == [id for id, _ in expected]
    assert [r["score"] for r in found] == pytest.approx([score for _, score in expected])
    with Searcher(address) as searcher:
        clients = [client_of(searcher), client_of(searcher)]
        assert clients[0].get(f"/api/videos/{found[0]['id']}/image").content[:3] == b"\xff\xd8\xff"
        index([write_clip(tmp_path / "new.mp4", 30)], address, progress=False)
        # A server sees new versions within seconds.
        until(lambda: all(client.get("/api/index").json()["videos"] == 9 for client in clients), seconds=10)
    assert main(["index", "--out", address]) == 0
    assert "0 videos added, 9 kept, 0 removed; 9 in the index" in capsys.readouterr().out


def test_a_missing_bucket_and_missing_credentials_are_one_sentence(bucket, monkeypatch):
    with pytest.raises(UnreadableError, match="s3://other/index cannot be read or written: the bucket does not exist"):
        IndexTable("s3://other/index", create=True)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UnreadableError, match="LanceDB finds no credentials"):
        IndexTable(f"{bucket}/index", create=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own libraries use what is deprecated
def test_ray_gives_the_index_of_one_machine_and_resumes(gallery, sources, small_index, tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "index"
    index([gallery / "below"], out, sources[1:], progress=False)
    report = index([gallery], out, batch_size=3, progress=False, actors=2)
    assert (report.added, report.kept) == (6, 2)
    with closing(IndexTable(out)) as ours, closing(IndexTable(small_index)) as other:
        assert sorted(ours.keys()) == sorted(other.keys())
    with Searcher(out) as ours, Searcher(small_index) as other:
        assert find(ours, "a cat") == find(other, "a cat")
