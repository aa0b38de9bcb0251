"""Indexing keeps unchanged videos, notices changes, and resumes after an interruption.

A read-only index can be searched and served; a busy one is waited for and never reported as damaged.
"""

import functools
import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path

import lancedb
import pyarrow as pa
import pytest
from child_processes import NOBODY, fork, unprivileged
from search_parts import client_of, find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.files import find_videos
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource
from tvr_lightning.search.table import TABLE, VERSION, IndexTable

FOREIGN_FILES = dict.fromkeys(("videos.d/mine.txt", "videos.txt", "videos.lance.bak"), "mine")
"""Files of the user whose names begin like those of an index."""
FAKE = "<html>I am an mp4</html>"


def write_foreign_files(folder):
    (folder / "videos.d").mkdir(parents=True)
    for name, content in FOREIGN_FILES.items():
        (folder / name).write_text(content)


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def content(folder):
    """Everything that an index contains about its videos, and those that it skipped."""
    found = {}
    with closing(IndexTable(folder)) as table:
        for row in table.videos():
            span = table.spans(row.id)[0].key
            features, times = table.features([span], "clip4clip")[span]
            picture = table.thumbnail(row.id, 0.0)
            found[row.path.name] = (span, row.duration, features.frames.numpy().tobytes(), times.tolist(), picture)
        return found, table.skipped()


def numbers(report):
    return report.added, report.kept, report.removed, report.total


@pytest.fixture
def out(tmp_path):
    return tmp_path / "index"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "videos"


@pytest.fixture
def update(folder, out, sources):
    """Index the folder with CLIP4Clip, and return the report."""
    return lambda **options: index([folder], out, sources[1:], batch_size=2, progress=False, **options)


def clips(folder, count):
    """Write short clips of different colors."""
    return [write_clip(folder / f"{number:02d}.mp4", number, frames=2) for number in range(count)]


def test_only_changes_are_indexed_and_an_open_searcher_sees_them(folder, out, update):
    paths = clips(folder, 5)
    assert update().added == 5
    before, _ = content(out)
    assert numbers(index([], out, progress=False)) == (0, 5, 0, 5)
    with Searcher(out) as searcher:
        assert len(find(searcher, "a cat").results) == 5
        write_clip(paths[0], 20)
        write_clip(folder / "new.mp4", 21)
        write_clip(folder / "newer.mp4", 22)
        paths[4].unlink()
        assert numbers(update()) == (3, 3, 1, 6)
        assert len(find(searcher, "a cat").results) == 6
        (folder / "newer.mp4").unlink()
        update()
        assert len(find(searcher, "a cat").results) == 5
    after, _ = content(out)
    assert set(after) == set(before) - {"04.mp4"} | {"new.mp4"}
    assert [name for name in after if after[name] != before.get(name)] == ["00.mp4", "new.mp4"]


def test_unreadable_videos_are_listed_and_the_others_indexed(folder, out, update, capsys):
    whole = clips(folder, 2)[1].read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.mp4").touch()
    (folder / "fake.mp4").write_text(FAKE)
    (folder / "notes.txt").write_text("no video")
    report = update()
    assert report.added == 2
    assert [Path(line.split(": ")[0]).name for line in report.skipped] == ["cut.mp4", "empty.mp4", "fake.mp4"]
    again = update()
    assert (again.added, len(again.skipped)) == (0, 3), "unreadable files are not read again unless they change"
    (folder / "cut.mp4").write_bytes(whole)
    assert (update().added, len(content(out)[1])) == (1, 2)
    for name in ("fake.mp4", "empty.mp4"):
        (folder / name).unlink()
    report = update()
    assert (report.kept, report.total, report.skipped) == (3, 3, []), "unreadable videos are removed without --prune"
    for path in folder.glob("*.mp4"):
        path.write_text(FAKE)
    assert main(["index", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "contains no videos" in printed
    assert "Next:" not in printed
    write_clip(folder / "cut.mp4", 1)
    assert main(["index", "--out", str(out)]) == 0


def test_links_to_files_outside_the_folder_are_ignored(folder, tmp_path):
    outside = tmp_path / "secret"
    (first,), (secret,) = clips(folder, 1), clips(outside, 1)
    (folder / "out.mp4").symlink_to(secret)
    (folder / "linked").symlink_to(outside)
    (folder / "again.mp4").symlink_to(first)
    (folder / "broken.mp4").symlink_to(folder / "nothing.mp4")
    files, problems, _ = find_videos([folder])
    assert [file.path for file in files] == [first], "a file with two names is one video"
    assert len(problems) == 2
    assert any("out.mp4: a symbolic link to a file outside" in problem for problem in problems)
    assert find_videos([first])[1:] == ([], set()), "a single file is no folder that cannot be read"


@pytest.fixture
def start_update(folder, out, sources, interpreter):
    """Start `update` in another process."""
    code = (
        "from tvr_lightning.search.indexing import index; from tvr_lightning.search.scorer import ScorerSource\n"
        f"index([{str(folder)!r}], {str(out)!r}, [ScorerSource({sources[1].checkpoint!r})], batch_size=2)"
    )
    return lambda: interpreter(code)


def test_two_writers_at_once_both_succeed(folder, out, update, start_update):
    clips(folder, 12)
    writers = [start_update() for _ in range(2)]
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    with closing(IndexTable(out)) as table:
        assert len(table.keys()) == len(set(table.keys())) == table.count() == 12
    assert numbers(update()) == (0, 12, 0, 12)


def test_missing_and_other_weights_are_refused_the_latter_with_both_fingerprints(indexed, gallery, sources, out):
    with pytest.raises(SearchError, match="needs a checkpoint or weights"):
        index([gallery], out, progress=False)
    shutil.copytree(indexed, out)
    with pytest.raises(SearchError, match="created with gare, clip4clip, but you named clip4clip"):
        index([gallery], out, sources[1:], progress=False)
    with closing(IndexTable(out)) as table:
        facts = table.fact("scorers")
        facts[0]["fingerprint"]["weights"] = "0" * 16
        table.set_fact("scorers", facts)
    for start in (lambda: Searcher(out), lambda: index([gallery], out, sources, progress=False)):
        with pytest.raises(SearchError, match=r"weights: the index has '0{16}', this run '[0-9a-f]{16}'\. Use"):
            start()


def write_table(folder, version=None):
    """Write a table of another program, or of another version of this one."""
    metadata = None if version is None else {"tvr:version": str(version), "tvr:scorers": "[]"}
    schema = pa.schema([pa.field("id", pa.string(), metadata=metadata)])
    lancedb.connect(folder).create_table(TABLE, schema=schema)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder.rmdir(), "contains no index"),
        (lambda folder: (folder / "catalog.sqlite").touch(), "was built by an older version. Build it again"),
        (lambda folder: (folder / "videos.lance" / "data").mkdir(parents=True), "contains no index"),
        (write_table, "contains a table of another program"),
        (lambda folder: write_table(folder, VERSION - 1), "was built by an older version. Build it again"),
        (lambda folder: write_table(folder, VERSION), "was changed by another program and has no bytes, captions, "),
    ],
)
def test_folders_without_an_index_are_refused(gallery, out, ckpt, change, message, capsys):
    out.mkdir()
    change(out)
    before = [(path, path.stat().st_mtime_ns) for path in sorted(out.rglob("*"))]
    with pytest.raises(SearchError, match=message):
        Searcher(out)
    if "no index" not in message:
        assert main(["index", str(gallery), "--out", str(out), *ckpt]) == 2
        assert message in capsys.readouterr().err
    assert [(path, path.stat().st_mtime_ns) for path in sorted(out.rglob("*"))] == before


def test_a_run_that_is_killed_before_its_first_batch_leaves_nothing(gallery, out, ckpt, ended):
    def killed_while_loading():
        build = functools.wraps(TinyClipEncoder.__init__)  # checkpoints are checked against its signature
        TinyClipEncoder.__init__ = build(lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        main(["index", str(gallery), "--out", str(out), *ckpt])

    process = ended(fork(killed_while_loading))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()


def test_a_folder_with_other_files_is_refused_and_none_of_them_removed(folder, out, ckpt, monkeypatch, capsys):
    """The user writes them while weights are loaded, and they are refused before weights are loaded."""
    build, command = TinyClipEncoder.__init__, ["index", str(folder), "--out", str(out), *ckpt]

    @functools.wraps(build)
    def build_while_the_user_writes(*given, **named):
        write_foreign_files(out)
        build(*given, **named)

    monkeypatch.setattr(TinyClipEncoder, "__init__", build_while_the_user_writes)
    folder.mkdir()
    (folder / "fake.mp4").write_text(FAKE)
    assert main(command) == 2
    assert "no video could be read" in capsys.readouterr().err
    assert files_of(out) == FOREIGN_FILES
    monkeypatch.setattr(TinyClipEncoder, "__init__", None)
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{out} contains files that are not part of an index (videos.d, videos.lance.bak, videos.txt)" in line
    assert files_of(out) == FOREIGN_FILES


def written(folder):
    """Return the number of videos in an index that another process may be writing."""
    try:
        return len(IndexTable(folder).keys())
    except SearchError:  # the other process has not written its first rows yet
        return 0


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_identical_index(folder, out, tmp_path, update, sources, start_update):
    clips(folder, 24)
    index([folder], tmp_path / "whole", sources[1:], batch_size=2, progress=False)
    generator, partial = random.Random(0), 0
    for _ in range(3):
        goal = written(out) + generator.randint(1, 6)
        process = start_update()
        while written(out) < goal and process.is_alive():
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 0.1))
        process.kill()
        process.join()
        partial += 0 < written(out) < 24
    assert partial, "no kill interrupted the run"
    assert update().total == 24
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("prune", [[], ["--prune"]])
def test_an_unmounted_disk_removes_nothing(tmp_path, out, sources, capsys, prune):
    disk, other = tmp_path / "disk", tmp_path / "other"
    clips(disk, 2)
    clips(other, 2)
    index([disk, other], out, sources[1:], progress=False)
    before = content(out)
    disk.rename(tmp_path / "unmounted")
    disk.mkdir()

    def update():
        assert main(["index", "--out", str(out), *prune]) == 0
        return capsys.readouterr().out

    printed = update()
    assert "0 videos added, 2 kept, 0 removed; 4 in the index" in printed
    assert f"{disk}: contains none of its 2 indexed videos, which stay in the index. Mount its disk" in printed
    assert content(out) == before
    write_clip(other / "new.mp4", 9)
    assert "1 videos added, 2 kept, 0 removed; 5 in the index" in update(), "the other folder is updated"
    disk.rmdir()
    (tmp_path / "unmounted").rename(disk)
    assert "0 videos added, 5 kept, 0 removed; 5 in the index" in update()


def test_removing_more_than_one_video_and_a_twentieth_of_an_index_requires_prune(folder, out, update, capsys):
    paths = clips(folder, 6)
    for path in paths[4:]:
        path.rename(path.with_suffix(".later"))
    assert update().total == 4
    paths[0].unlink()
    assert update().removed == 1, "one video of a small index"
    for path in paths[4:]:
        path.with_suffix(".later").rename(path)
    assert update().total == 5
    for path in paths[1:3]:
        path.unlink()
    write_clip(folder / "new.mp4", 50)
    before = content(out)
    assert main(["index", "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"2 of the 5 videos in {out} are missing from its folders, such as {paths[1]}" in line
    assert "Restore them, or pass --prune to remove them from the index" in line
    assert content(out) == before
    assert main(["index", "--out", str(out), "--prune"]) == 0
    assert "1 videos added, 3 kept, 2 removed; 4 in the index" in capsys.readouterr().out


def test_videos_that_moved_within_their_folder_replace_the_old_ones_with_prune(folder, out, update):
    paths = clips(folder, 3)
    update()
    (folder / "2024").mkdir()
    for path in paths:
        path.rename(folder / "2024" / path.name)
    report = update()
    assert numbers(report) == (3, 0, 0, 6)
    assert any("contains none of its 3 indexed videos" in problem for problem in report.problems)
    assert update(prune=True).removed == 3
    assert set(content(out)[0]) == {path.name for path in paths}


def test_a_full_disk_loses_one_batch_and_is_reported_in_one_line(folder, tmp_path, ckpt, limit_files, capsys):
    def run(out):
        return main(["index", str(folder), "--out", str(out), *ckpt, "--batch_size", "2"])

    clips(folder, 6)
    write_clip(folder / "long.mp4", 6, frames=1600)
    whole = tmp_path / "whole"
    assert run(whole) == 0
    size = max(path.stat().st_size for path in whole.rglob("*.lance") if path.is_file())
    for limit, kept in ((0, 0), (size - 1, 6)):
        out = tmp_path / f"index-{limit}"
        capsys.readouterr()
        limit_files(limit)
        assert run(out) == 2
        limit_files()
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert f"{out} cannot be read or written: the disk is full" in line
        assert written(out) == kept
        assert run(out) == 0
        assert f"{7 - kept} videos added, {kept} kept" in capsys.readouterr().out
        assert content(out) == content(whole)


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
def public():
    """A temporary folder that any user can read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def gallery_index(public, checkpoints):
    """An index of two videos that any user can read."""
    for number in range(2):
        write_clip(public / "videos" / f"{number}.mp4", number)
    write_clip(public / "videos" / "closed" / "b.mp4", 4)
    source = ScorerSource(str(shutil.copy(checkpoints["clip4clip"], public / "method.ckpt")))
    index([public / "videos"], public / "index", [source], bank=["a cat"], progress=False)
    return public / "index"


def test_a_read_only_index_is_searched_and_served_but_not_written(public, gallery_index, capsys):
    with Searcher(gallery_index) as searcher:
        expected = find(searcher, "a cat")
    before = sorted(path.name for path in gallery_index.rglob("*"))
    write_clip(public / "videos" / "new.mp4", 7)
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
        assert main(["index", str(public / "videos"), "--out", str(gallery_index)]) == 2
        assert "cannot be read or written: permission denied" in capsys.readouterr().err


def test_an_unreadable_folder_is_named_and_its_videos_stay_in_the_index(public, gallery_index):
    closed = public / "videos" / "closed"
    for path in (gallery_index, *gallery_index.rglob("*")):
        os.chown(path, NOBODY if os.geteuid() == 0 else -1, -1)
    closed.chmod(0)
    with unprivileged():
        report = index([public / "videos"], gallery_index, progress=False)
    closed.chmod(0o700)
    assert any("closed: Permission denied" in problem for problem in report.problems)
    assert (report.kept, report.removed, report.total) == (2, 0, 3)


def test_a_reader_without_write_permission_sees_the_changes_of_a_writer(public, gallery_index):
    with read_only(gallery_index):
        reader = IndexTable(gallery_index)
        assert reader.count() == 3
    write_clip(public / "videos" / "new.mp4", 7)
    index([public / "videos"], gallery_index, progress=False)
    with read_only(gallery_index):
        assert reader.count() == 4


def test_an_unreadable_index_is_not_reported_as_damaged(gallery_index):
    for path in (gallery_index / "videos.lance", gallery_index):
        path.chmod(0)
        with unprivileged(), pytest.raises(SearchError, match="cannot be read or written: permission denied"):
            Searcher(gallery_index)
        path.chmod(0o755)
