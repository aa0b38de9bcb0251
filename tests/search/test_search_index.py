"""Indexing keeps unchanged videos, notices changes, and resumes after a kill."""

import contextlib
import errno
import fcntl
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from search_parts import find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import BusyError, SearchError
from tvr_lightning.search.files import find_videos
from tvr_lightning.search.indexing import index
from tvr_lightning.search.vectors import open_vectors, update_vectors

FOREIGN_FILES = ("vectors.d/mine.txt", "vectors.txt", "catalog.sqlite.bak")
"""Files of the user whose names begin like those of an index."""
FAKE = "<html>I am an mp4</html>"


def write_foreign_files(folder):
    for name in FOREIGN_FILES:
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")


def foreign_files_are_intact(folder):
    return all((folder / name).is_file() and (folder / name).read_text() == "mine" for name in FOREIGN_FILES)


def content(folder):
    """Everything that an index contains about its videos."""
    found = {}
    with contextlib.closing(Catalog(folder)) as catalog:
        for row in catalog.videos():
            span = catalog.spans(row.id)[0].key
            features, times = catalog.features(span, "clip4clip")
            picture = catalog.thumbnail(row.id, 0.0)
            found[row.path.name] = (span, row.duration, features.frames.numpy().tobytes(), times.tolist(), picture)
        return found, catalog.skipped()


def make(folder, out, sources, **options):
    return index([folder], out, sources[1:], batch_size=2, progress=False, **options)


def clips(folder, count):
    return [write_clip(folder / f"{number:02d}.mp4", number, frames=2) for number in range(count)]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "index"


@pytest.fixture
def folder(gallery, tmp_path):
    """A copy of the gallery."""
    return shutil.copytree(gallery, tmp_path / "videos")


def test_only_what_is_new_changed_or_gone_is_touched_and_seen_by_an_open_searcher(folder, out, sources):
    assert make(folder, out, sources).added == 8
    before, _ = content(out)
    again = index([], out, progress=False)
    assert (again.added, again.kept, again.removed, again.total) == (0, 8, 0, 8)
    with Searcher(out) as searcher:
        assert len(find(searcher, "a cat").results) == 8
        write_clip(folder / "clip0.mp4", 20)
        write_clip(folder / "new.mp4", 21)
        write_clip(folder / "newer.mp4", 22)
        (folder / "below" / "clip7.mp4").unlink()
        report = make(folder, out, sources)
        assert (report.added, report.kept, report.removed, report.total) == (3, 6, 1, 9)
        assert len(find(searcher, "a cat").results) == 9
        (folder / "newer.mp4").unlink()
        make(folder, out, sources)
        assert len(find(searcher, "a cat").results) == 8
    after, _ = content(out)
    assert set(after) == set(before) - {"clip7.mp4"} | {"new.mp4"}
    assert [name for name in after if after[name] != before.get(name)] == ["clip0.mp4", "new.mp4"]


def test_unreadable_videos_are_listed_and_the_others_indexed(folder, out, sources):
    (folder / "fake.mp4").write_text(FAKE)
    whole = (folder / "clip2.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.mp4").touch()
    (folder / "notes.txt").write_text("no video by its name")
    report = make(folder, out, sources)
    assert report.added == 8
    assert [Path(line.split(": ")[0]).name for line in report.skipped] == ["cut.mp4", "empty.mp4", "fake.mp4"]
    again = make(folder, out, sources)
    assert (again.added, len(again.skipped)) == (0, 3), "unreadable files are not read again unless they change"
    shutil.copy(folder / "clip2.mp4", folder / "cut.mp4")
    assert (make(folder, out, sources).added, len(content(out)[1])) == (1, 2)
    for name in ("fake.mp4", "empty.mp4"):
        (folder / name).unlink()
    report = make(folder, out, sources)
    assert (report.kept, report.total, report.skipped) == (9, 9, []), "unreadable videos are removed without --prune"


def test_an_index_whose_videos_became_unreadable_says_so(tmp_path, out, sources, capsys):
    path = write_clip(tmp_path / "videos" / "a.mp4", 1)
    make(path.parent, out, sources)
    path.write_text(FAKE)
    assert main(["index", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "contains no videos" in printed
    assert "Next:" not in printed
    write_clip(path, 1)
    assert main(["index", "--out", str(out)]) == 0


def test_links_that_lead_out_are_left_out(tmp_path):
    folder, outside = tmp_path / "videos", tmp_path / "secret"
    write_clip(folder / "a.mp4", 1)
    write_clip(outside / "b.mp4", 2)
    (folder / "out.mp4").symlink_to(outside / "b.mp4")
    (folder / "linked").symlink_to(outside)
    (folder / "again.mp4").symlink_to(folder / "a.mp4")
    (folder / "broken.mp4").symlink_to(folder / "nothing.mp4")
    files, problems, _ = find_videos([folder])
    assert [file.path.name for file in files] == ["a.mp4"], "a file under two names is one video"
    assert len(problems) == 2
    assert any("out.mp4: a symbolic link to a file outside" in problem for problem in problems)


def test_a_second_writer_is_refused(gallery, out, sources, monkeypatch):
    out.mkdir()
    with (out / "writer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="Another process is writing the index"):
            make(gallery, out, sources)

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="without file locks .*do not start a second process for the index"):
        assert make(gallery, out, sources).total == 8


def test_other_weights_are_refused_with_both_fingerprints(indexed, gallery, sources, out):
    shutil.copytree(indexed, out)
    with pytest.raises(SearchError, match="created with gare, clip4clip, but you named clip4clip"):
        index([gallery], out, sources[1:], progress=False)
    with contextlib.closing(Catalog(out)) as catalog:
        facts = catalog.fact("scorers")
        facts[0]["fingerprint"]["weights"] = "0" * 16
        catalog.set_fact("scorers", facts)
    for start in (lambda: Searcher(out), lambda: index([gallery], out, sources, progress=False)):
        with pytest.raises(SearchError, match=r"weights: the index has '0{16}', this run '[0-9a-f]{16}'\. Use"):
            start()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: folder.rmdir(), "contains no index"),
        (lambda folder: (folder / "catalog.sqlite").write_bytes(b"no database" * 100), "damaged"),
        (lambda folder: Catalog(folder, create=True).close(), "indexing has not started"),
    ],
)
def test_folders_that_contain_no_index_are_refused(out, change, said):
    out.mkdir()
    change(out)
    with pytest.raises(SearchError, match=said):
        Searcher(out)


@pytest.mark.parametrize(
    ("videos", "weights", "said"),
    [
        (None, True, "No videos are given"),
        ("nowhere", True, "no such file or folder"),
        (".", False, "needs a checkpoint or weights"),
    ],
)
def test_a_new_index_needs_videos_and_weights(gallery, out, sources, videos, weights, said):
    with pytest.raises(SearchError, match=said):
        index([gallery / videos] if videos else [], out, sources if weights else (), progress=False)
    assert not out.exists()


def execute(out, statement):
    with contextlib.closing(sqlite3.connect(out / "catalog.sqlite")) as other, other:
        other.execute(statement)


def test_an_index_of_an_older_format_is_refused(indexed, out, capsys):
    shutil.copytree(indexed, out)
    execute(out, "UPDATE facts SET value = '1' WHERE name = 'version'")
    for words in (["serve", "--index"], ["search", "a", "--index"], ["index", "--out"]):
        assert main([*words, str(out)]) == 1
        said = capsys.readouterr().err
        assert "was built by an older version. Build it again with tvr index" in said
        assert len(said.splitlines()) == 1


def test_a_database_of_another_program_is_refused_and_unchanged(gallery, out, ckpt, capsys):
    out.mkdir()
    execute(out, "CREATE TABLE books (title TEXT)")
    before = (out / "catalog.sqlite").read_bytes()
    assert main(["index", str(gallery), "--out", str(out), *ckpt]) == 2
    assert "catalog.sqlite is a database of another program" in capsys.readouterr().err
    with pytest.raises(SearchError, match="database of another program"):
        Searcher(out)
    assert (out / "catalog.sqlite").read_bytes() == before


def test_a_new_index_refuses_a_folder_with_other_files_before_weights_are_loaded(gallery, tmp_path, out, capsys):
    write_foreign_files(out)
    (tmp_path / "nowhere.ckpt").write_text("no weights")
    assert main(["index", str(gallery), "--out", str(out), "--ckpt_path", str(tmp_path / "nowhere.ckpt")]) == 2
    said = capsys.readouterr().err
    assert f"{out} contains files that are not part of an index (catalog.sqlite.bak, vectors.d, vectors.txt)" in said
    assert "Choose a new or empty folder with --out." in said
    assert len(said.splitlines()) == 1
    assert foreign_files_are_intact(out)
    assert len(list(out.iterdir())) == 3


def checkpoint_that_kills(checkpoints, folder):
    """A checkpoint whose encoder's module kills the process that imports it."""
    (folder / "deadly.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    content = torch.load(checkpoints["clip4clip"])
    content["hyper_parameters"]["encoder"]["class_path"] = "deadly.Encoder"
    torch.save(content, folder / "deadly.ckpt")
    return ["--ckpt_path", str(folder / "deadly.ckpt"), "--trust", "deadly"]


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("new_folder", [True, False])
def test_a_failed_index_removes_nothing_of_the_user(
    gallery, tmp_path, out, checkpoints, ckpt, monkeypatch, capsys, new_folder, killed
):
    if not new_folder:
        out.mkdir()
    if killed:
        monkeypatch.syspath_prepend(tmp_path)
        weights = checkpoint_that_kills(checkpoints, tmp_path)
        assert forked.tvr(["index", str(gallery), "--out", str(out), *weights], tmp_path).returncode == -9
        assert (out / "catalog.sqlite").is_file()
        write_foreign_files(out)
    else:
        built = TinyClipEncoder.__init__

        def build(*given, **named):
            write_foreign_files(out)  # the user writes files while `tvr index` runs
            built(*given, **named)

        monkeypatch.setattr(TinyClipEncoder, "__init__", build)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "fake.mp4").write_text(FAKE)
    assert main(["index", str(tmp_path / "videos"), "--out", str(out), *ckpt])
    assert "no video could be read" in capsys.readouterr().err
    assert foreign_files_are_intact(out)
    if killed:
        assert main(["index", str(gallery), "--out", str(out), *ckpt]) == 0
        assert foreign_files_are_intact(out)
    else:
        assert len(list(out.iterdir())) == 3, "what the run itself made is gone"


def test_a_store_that_misses_vectors_catches_up(indexed, out, qdrant):
    shutil.copytree(indexed, out)
    with contextlib.closing(Catalog(out)) as catalog, contextlib.closing(open_vectors(catalog, qdrant)) as store:
        store.add([1, 2], torch.eye(2, 64))
        update_vectors(store, catalog)
        assert store.keys() == catalog.keys()


def written(folder):
    """Return the number of videos in an index that another process may be writing."""
    try:
        catalog = Catalog(folder)
    except SearchError:  # the other process has not written its tables yet
        return 0
    with contextlib.closing(catalog):
        return len(catalog.keys())


KILLED = """
import sys, tvr_lightning, torch
torch.set_num_threads(1)
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource
print("ready", flush=True)
index([sys.argv[1]], sys.argv[2], [ScorerSource(sys.argv[3])], batch_size=2, progress=False)
"""


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_identical_index(tmp_path, checkpoints, sources, ended):
    folder, killed = tmp_path / "videos", tmp_path / "killed"
    for number in range(40):
        write_clip(folder / f"{number:02d}.mp4", number)
    make(folder, tmp_path / "whole", sources)
    command = [sys.executable, "-c", KILLED, str(folder), str(killed), str(checkpoints["clip4clip"])]
    generator, partial = random.Random(0), 0
    for _ in range(4):
        process = ended(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
        process.stdout.readline()
        goal = written(killed) + generator.randint(1, 6)
        while written(killed) < goal and process.poll() is None:
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        partial += 0 < written(killed) < 40
    assert partial, "no kill fell into the run"
    assert make(folder, killed, sources).total == 40
    assert content(killed) == content(tmp_path / "whole")
    with contextlib.closing(Catalog(killed)) as catalog:
        assert open_vectors(catalog).keys() == catalog.keys()


@pytest.mark.parametrize("prune", [[], ["--prune"]])
def test_an_unmounted_disk_removes_nothing(tmp_path, out, sources, capsys, prune):
    disk, other = tmp_path / "disk", tmp_path / "other"
    clips(disk, 8)
    clips(other, 2)
    index([disk, other], out, sources[1:], progress=False)
    before = content(out)
    disk.rename(tmp_path / "unmounted")
    disk.mkdir()
    update = ["index", "--out", str(out), *prune]
    assert main(update) == 0
    said = capsys.readouterr().out
    assert "0 videos added, 2 kept, 0 removed; 10 in the index" in said
    assert f"{disk}: contains none of its 8 indexed videos, which stay in the index. Mount its disk" in said
    assert content(out) == before
    write_clip(other / "new.mp4", 9)
    assert main(update) == 0
    assert "1 videos added, 2 kept, 0 removed; 11 in the index" in capsys.readouterr().out, "the other is updated"
    disk.rmdir()
    (tmp_path / "unmounted").rename(disk)
    assert main(update) == 0
    assert "0 videos added, 11 kept, 0 removed; 11 in the index" in capsys.readouterr().out


def test_removing_much_of_an_index_requires_prune(tmp_path, out, sources, capsys):
    folder = tmp_path / "videos"
    paths = clips(folder, 40)
    assert make(folder, out, sources).total == 40
    for path in paths[:3]:
        path.unlink()
    write_clip(folder / "new.mp4", 50)
    before = content(out)
    assert main(["index", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"3 of the 40 videos in {out} are missing from its folders, such as {paths[0]}" in said
    assert "Restore them, or pass --prune to remove them from the index" in said
    assert len(said.splitlines()) == 1
    assert content(out) == before, "nothing is changed"
    assert main(["index", "--out", str(out), "--prune"]) == 0
    assert "1 videos added, 37 kept, 3 removed; 38 in the index" in capsys.readouterr().out
    paths[5].unlink()
    assert main(["index", "--out", str(out)]) == 0
    assert "0 videos added, 37 kept, 1 removed; 37 in the index" in capsys.readouterr().out


def test_one_video_of_a_small_index_is_removed_without_prune_and_two_are_not(tmp_path, out, sources):
    folder = tmp_path / "videos"
    paths = clips(folder, 5)
    make(folder, out, sources)
    paths[0].unlink()
    assert make(folder, out, sources).removed == 1
    for path in paths[1:3]:
        path.unlink()
    with pytest.raises(SearchError, match="2 of the 4 videos"):
        make(folder, out, sources)
    assert make(folder, out, sources, prune=True).removed == 2
    assert set(content(out)[0]) == {"03.mp4", "04.mp4"}


def test_videos_that_moved_within_their_folder_replace_the_old_ones_with_prune(tmp_path, out, sources):
    folder = tmp_path / "videos"
    paths = clips(folder, 3)
    make(folder, out, sources)
    (folder / "2024").mkdir()
    for path in paths:
        path.rename(folder / "2024" / path.name)
    report = make(folder, out, sources)
    assert (report.added, report.removed, report.total) == (3, 0, 6)
    assert any("contains none of its 3 indexed videos" in problem for problem in report.problems)
    assert make(folder, out, sources, prune=True).removed == 3
    assert set(content(out)[0]) == {path.name for path in paths}


@contextlib.contextmanager
def largest_file(size):
    """Limit the size of files of this process; writing more fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_one_batch_and_ends_in_one_sentence(gallery, tmp_path, ckpt, capsys):
    def run(out):
        return main(["index", str(gallery), "--out", str(out), *ckpt, "--batch_size", "2"])

    whole, kept = tmp_path / "whole", set()
    assert run(whole) == 0
    size = max(path.stat().st_size for path in whole.iterdir())
    for share in (0.0, 0.5, 0.7, 0.8, 0.9, 1.0):
        out = tmp_path / f"index-{share}"
        with largest_file(int(share * size)):
            status = run(out)
        said = capsys.readouterr().err
        if status:
            assert "cannot be" in said
            assert "written" in said
            assert len(said.strip().splitlines()) == 1
        before = written(out)
        kept.add(before)
        assert out.exists() == bool(before), "an index without videos is none"
        assert run(out) == 0
        assert f"{8 - before} videos added, {before} kept" in capsys.readouterr().out
        assert content(out) == content(whole)
    assert 0 in kept
    assert kept & set(range(1, 8)), "no limit fell into the run"


def test_a_full_disk_under_the_vectors_ends_in_one_sentence(gallery, out, sources):
    make(gallery, out, sources)
    shutil.rmtree(out / "vectors.lance")
    with contextlib.closing(Catalog(out)) as catalog:
        store = open_vectors(catalog)
        with largest_file(200), pytest.raises(SearchError, match=r"LanceDB cannot write to it .*rerun tvr index"):
            update_vectors(store, catalog)
    assert make(gallery, out, sources, store="lancedb").kept == 8
    with Searcher(out) as searcher:
        assert len(find(searcher, "a").results) == 8
