"""A read-only index can be searched and served; a busy one is waited for and never reported as damaged."""

import os
import shutil
import sqlite3
import tempfile
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from child_processes import fork
from search_parts import client_of, find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.search import catalog
from tvr_lightning.search.catalog import VERSION, Catalog
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import BusyError, SearchError
from tvr_lightning.search.files import VideoFile
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource

NOBODY = 65534


def write_until_killed(file):
    """Write more than the cache holds in a transaction, and end without its commit."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.executescript("PRAGMA cache_size = 1; BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO facts VALUES (?, '1')", ((f"{number:0100}",) for number in range(2000)))
    os._exit(9)


@contextmanager
def unprivileged():
    """Run as a user without privileges inside the context, since root can read and write everything."""
    user = os.geteuid()
    os.seteuid(NOBODY if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


@contextmanager
def read_only(folder):
    """Make a folder and its files read-only inside the context, even for root."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with unprivileged():
            yield
    finally:
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def folder():
    """A temporary folder that any user can read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def gallery_index(folder, checkpoints):
    """An index of two videos that any user can read."""
    for number in range(2):
        write_clip(folder / "videos" / f"{number}.mp4", number)
    write_clip(folder / "videos" / "closed" / "b.mp4", 4)
    source = ScorerSource(str(shutil.copy(checkpoints["clip4clip"], folder / "method.ckpt")))
    index([folder / "videos"], folder / "index", [source], bank=["a cat"], progress=False)
    return folder / "index"


@pytest.fixture
def out(folder):
    """An empty index."""
    Catalog(folder / "index", create=True).close()
    return folder / "index"


def add(catalog, number):
    catalog.add_video(VideoFile(Path(f"/videos/{number}.mp4"), 1, 1), 1.0, (0, 0))


def test_a_read_only_index_is_searched_and_served_but_not_written(folder, gallery_index, capsys):
    with Searcher(gallery_index) as searcher:
        expected = find(searcher, "a cat")
    before = sorted(path.name for path in gallery_index.iterdir())
    with read_only(gallery_index):
        with Searcher(gallery_index) as searcher:
            assert find(searcher, "a cat") == expected
            client = client_of(searcher)
            found = client.get("/api/search", params={"query": "a cat"}).json()["results"]
            assert len(found) == 3
            for address in ("image", "about"):
                assert client.get(f"/api/videos/{found[0]['id']}/{address}").status_code == 200
            with pytest.raises(SearchError, match=r"cannot be read or written .*readonly database.*permissions"):
                searcher.catalog.set_fact("other", 1)
        assert sorted(path.name for path in gallery_index.iterdir()) == before
        assert main(["index", str(folder / "videos"), "--out", str(gallery_index)]) == 2
        printed = capsys.readouterr().err
        assert "cannot be written" in printed
        assert "damaged" not in printed


def test_an_unreadable_folder_is_named_and_its_videos_stay_in_the_index(folder, gallery_index):
    closed = folder / "videos" / "closed"
    for path in (gallery_index, *gallery_index.iterdir()):
        os.chown(path, NOBODY if os.geteuid() == 0 else -1, -1)
    closed.chmod(0)
    with unprivileged():
        report = index([folder / "videos"], gallery_index, progress=False)
    closed.chmod(0o700)
    assert any("closed: Permission denied" in problem for problem in report.problems)
    assert (report.kept, report.removed, report.total) == (2, 0, 3)


def test_a_reader_without_write_permission_sees_the_changes_of_a_writer(out):
    with closing(Catalog(out)) as writer:
        add(writer, 0)
    out.chmod(0o555)
    (out / "catalog.sqlite").chmod(0o444 if os.geteuid() == 0 else 0o644)
    with unprivileged():
        reader = Catalog(out)
        assert reader.count() == 1
    out.chmod(0o755)
    with closing(Catalog(out, create=True)) as writer:
        add(writer, 1)
        with unprivileged():
            assert reader.count() == 2, "while the writer is open"
        add(writer, 2)
    with unprivileged():
        assert reader.count() == 3, "after it was closed"
        reader.close()


def test_changes_of_a_killed_writer_are_rolled_back_or_reported(out):
    process = fork(write_until_killed, out / "catalog.sqlite")
    process.join()
    assert process.exitcode == 9
    assert (out / "catalog.sqlite-journal").stat().st_size
    with read_only(out), pytest.raises(SearchError, match="changes from an interrupted run but is read-only"):
        Catalog(out)
    with closing(Catalog(out)) as reader:
        assert reader.fact(f"{0:0100}") is None
        assert reader.fact("version") == VERSION


def test_an_unreadable_index_is_not_reported_as_damaged(out):
    (out / "catalog.sqlite").chmod(0)
    with unprivileged(), pytest.raises(SearchError, match=r"cannot be read or written \(unable to open.*permissions"):
        Catalog(out)


def test_a_locked_index_is_waited_for_and_then_reported_as_busy(out, monkeypatch):
    options = {"isolation_level": None, "check_same_thread": False}
    with closing(sqlite3.connect(out / "catalog.sqlite", **options)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(catalog, "PATIENCE", 0.3)
        for create in (False, True):
            with pytest.raises(BusyError, match="is in use by another process"):
                Catalog(out, create=create)
        monkeypatch.setattr(catalog, "PATIENCE", 60.0)
        began = time.monotonic()
        threading.Timer(1.0, holder.execute, ["ROLLBACK"]).start()
        with closing(Catalog(out)) as opened:
            assert time.monotonic() - began > 0.8
            assert opened.fact("version") == VERSION


def test_readers_do_not_wait_for_a_writer(out, monkeypatch):
    monkeypatch.setattr(catalog, "PATIENCE", 0.3)
    with closing(sqlite3.connect(out / "catalog.sqlite", isolation_level=None)) as writer, closing(Catalog(out)) as own:
        writer.execute("BEGIN IMMEDIATE")
        assert own.fact("version") == VERSION
        with closing(Catalog(out)) as again:
            assert again.count() == 0
        with pytest.raises(BusyError, match="is in use by another process"):
            own.set_fact("other", 1)
