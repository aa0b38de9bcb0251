"""A read-only index can be searched and served; a busy one is waited for and never reported as damaged."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from child_processes import end
from search_parts import find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.search import catalog
from tvr_lightning.search.catalog import VERSION, Catalog
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import BusyError, SearchError
from tvr_lightning.search.files import VideoFile
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource

NOBODY = 65534
HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA locking_mode=EXCLUSIVE")
connection.execute("BEGIN EXCLUSIVE")
connection.execute("UPDATE facts SET value = value")
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def read_only(folder):
    """Make a folder and its files read-only inside the context, even for root."""
    user = os.geteuid()
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    os.seteuid(NOBODY if user == 0 else user)  # root writes everything
    try:
        yield
    finally:
        os.seteuid(user)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


@contextmanager
def held(folder):
    """Another process that keeps the catalog locked."""
    command = [sys.executable, "-c", HOLDER, str(folder / "catalog.sqlite")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        end(process)


@pytest.fixture(scope="module")
def gallery_for_all(checkpoints):
    """A folder with videos and a checkpoint that any user can read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for number in range(3):
            write_clip(folder / "videos" / f"{number}.mp4", number)
        shutil.copy(checkpoints["clip4clip"], folder / "method.ckpt")
        yield folder


@pytest.fixture
def room(gallery_for_all):
    yield gallery_for_all
    shutil.rmtree(gallery_for_all / "index", ignore_errors=True)


def add(catalog, number):
    catalog.add_video(VideoFile(Path(f"/videos/{number}.mp4"), 1, 1), 1.0, (0, 0))


def test_a_read_only_index_is_searched_and_served_and_not_written(room, capsys):
    pytest.importorskip("lancedb", reason="the extra `search` is not installed")
    out, source = room / "index", ScorerSource(str(room / "method.ckpt"))
    index([room / "videos"], out, [source], bank=["a cat"], progress=False)
    with Searcher(out) as searcher:
        expected = find(searcher, "a cat")
    before = sorted(path.name for path in out.iterdir())
    with read_only(out):
        with Searcher(out) as searcher:
            assert find(searcher, "a cat") == expected
            serve(searcher)
            with pytest.raises(SearchError, match=r"cannot be read or written .*readonly database.*permissions"):
                searcher.catalog.set_fact("other", 1)
        assert sorted(path.name for path in out.iterdir()) == before
        assert main(["index", str(room / "videos"), "--out", str(out)]) == 1
        said = capsys.readouterr().err
        assert "cannot be written" in said
        assert "damaged" not in said
    assert index([], out, progress=False).kept == 3


def serve(searcher):
    pytest.importorskip("fastapi", reason="the extra `search` is not installed")
    pytest.importorskip("httpx", reason="httpx drives the application in tests")
    from starlette.testclient import TestClient

    from tvr_lightning.search.server import ServerOptions, create_app

    client = TestClient(create_app(searcher, ServerOptions()), base_url="http://127.0.0.1")
    found = client.get("/api/search", params={"query": "a cat"}).json()["results"]
    assert len(found) == 3
    for address in ("picture", "about"):
        assert client.get(f"/api/videos/{found[0]['id']}/{address}").status_code == 200
    assert client.get("/health").status_code == 200


def test_a_reader_without_permission_sees_what_a_writer_adds(room):
    out = room / "index"
    writer = Catalog(out, create=True)
    add(writer, 0)
    writer.close()
    user = os.geteuid()
    out.chmod(0o555)
    (out / "catalog.sqlite").chmod(0o444 if user == 0 else 0o644)
    os.seteuid(NOBODY if user == 0 else user)
    try:
        reader = Catalog(out)
        assert reader.count() == 1
        os.seteuid(user)
        out.chmod(0o755)
        writer = Catalog(out, create=True)
        add(writer, 1)
        os.seteuid(NOBODY if user == 0 else user)
        assert reader.count() == 2, "while the writer has it open"
        os.seteuid(user)
        add(writer, 2)
        writer.close()
        os.seteuid(NOBODY if user == 0 else user)
        assert reader.count() == 3, "after it is gone"
        reader.close()
    finally:
        os.seteuid(user)
        out.chmod(0o755)


def test_changes_of_a_killed_writer_are_undone_or_named(room):
    out = room / "index"
    Catalog(out, create=True).close()
    killed = (
        "import sys, os, sqlite3\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.executescript('PRAGMA cache_size = 1; BEGIN IMMEDIATE')\n"
        "for number in range(2000):\n"
        "    connection.execute(\"INSERT INTO facts VALUES (?, '1')\", (f'{number:0100}',))\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", killed, str(out / "catalog.sqlite")], check=False)
    assert (out / "catalog.sqlite-journal").stat().st_size
    with read_only(out), pytest.raises(SearchError, match="changes from an interrupted run but is read-only"):
        Catalog(out)
    reader = Catalog(out)
    assert reader.fact(f"{0:0100}") is None
    assert reader.fact("version") == VERSION
    reader.close()


def test_a_file_that_cannot_be_read_is_not_called_damaged(room):
    out = room / "index"
    Catalog(out, create=True).close()
    user = os.geteuid()
    (out / "catalog.sqlite").chmod(0)
    os.seteuid(NOBODY if user == 0 else user)
    try:
        with pytest.raises(SearchError, match=r"cannot be read or written \(unable to open.*permissions"):
            Catalog(out)
    finally:
        os.seteuid(user)


def test_a_busy_index_is_waited_for_and_then_called_busy(tmp_path, monkeypatch):
    out = tmp_path / "index"
    Catalog(out, create=True).close()
    with held(out) as process:
        monkeypatch.setattr(catalog, "PATIENCE", 0.3)
        for create in (False, True):
            with pytest.raises(BusyError, match="is in use by another process"):
                Catalog(out, create=create)
        monkeypatch.setattr(catalog, "PATIENCE", 60.0)
        began = time.monotonic()
        threading.Timer(1.0, process.kill).start()
        opened = Catalog(out)
        assert time.monotonic() - began > 0.8
        assert opened.fact("version") == VERSION
        opened.close()


def test_who_only_reads_waits_for_no_writer(tmp_path, monkeypatch):
    out = tmp_path / "index"
    Catalog(out, create=True).close()
    monkeypatch.setattr(catalog, "PATIENCE", 0.3)
    reader, other = Catalog(out), sqlite3.connect(out / "catalog.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        assert reader.fact("version") == VERSION
        again = Catalog(out)
        assert again.count() == 0
        again.close()
        with pytest.raises(BusyError, match="is in use by another process"):
            reader.set_fact("other", 1)
    finally:
        other.close()
        reader.close()
