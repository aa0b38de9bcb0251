"""A read-only index can be searched and served; a busy one is waited for and never reported as damaged."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from child_processes import NOBODY, unprivileged
from search_parts import client_of, find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource
from tvr_lightning.search.table import IndexTable


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


def test_a_read_only_index_is_searched_and_served_but_not_written(folder, gallery_index, capsys):
    with Searcher(gallery_index) as searcher:
        expected = find(searcher, "a cat")
    before = sorted(path.name for path in gallery_index.rglob("*"))
    write_clip(folder / "videos" / "new.mp4", 7)
    with read_only(gallery_index):
        with Searcher(gallery_index) as searcher:
            assert find(searcher, "a cat") == expected
            client = client_of(searcher)
            found = client.get("/api/search", params={"query": "a cat"}).json()["results"]
            assert len(found) == 3
            for address in ("image", "about"):
                assert client.get(f"/api/videos/{found[0]['id']}/{address}").status_code == 200
            with pytest.raises(SearchError, match="cannot be read or written: permission denied"):
                searcher.table.set_fact("other", 1)
        assert sorted(path.name for path in gallery_index.rglob("*")) == before
        assert main(["index", str(folder / "videos"), "--out", str(gallery_index)]) == 2
        assert "cannot be read or written: permission denied" in capsys.readouterr().err


def test_an_unreadable_folder_is_named_and_its_videos_stay_in_the_index(folder, gallery_index):
    closed = folder / "videos" / "closed"
    for path in (gallery_index, *gallery_index.rglob("*")):
        os.chown(path, NOBODY if os.geteuid() == 0 else -1, -1)
    closed.chmod(0)
    with unprivileged():
        report = index([folder / "videos"], gallery_index, progress=False)
    closed.chmod(0o700)
    assert any("closed: Permission denied" in problem for problem in report.problems)
    assert (report.kept, report.removed, report.total) == (2, 0, 3)


def test_a_reader_without_write_permission_sees_the_changes_of_a_writer(folder, gallery_index):
    with read_only(gallery_index):
        reader = IndexTable(gallery_index)
        assert reader.count() == 3
    write_clip(folder / "videos" / "new.mp4", 7)
    index([folder / "videos"], gallery_index, progress=False)
    with read_only(gallery_index):
        assert reader.count() == 4


def test_an_unreadable_index_is_not_reported_as_damaged(gallery_index):
    for path in (gallery_index / "videos.lance", gallery_index):
        path.chmod(0)
        with unprivileged(), pytest.raises(SearchError, match="cannot be read or written: permission denied"):
            Searcher(gallery_index)
        path.chmod(0o755)
