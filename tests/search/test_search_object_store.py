"""An index in an object store, whose server runs on this machine, and an index that the actors of Ray make."""

import json
from contextlib import closing

import boto3
import pytest
from child_processes import until
from moto.server import ThreadedMotoServer
from search_parts import client_of, find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import UnreadableError
from tvr_lightning.search.indexing import index
from tvr_lightning.search.table import IndexTable


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
