"""Indexing keeps unchanged videos, notices changes, and resumes after a kill."""

import contextlib
import errno
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forked
import pytest
import torch
from search_parts import find, foreign_files_are_intact, write_clip, write_foreign_files

from tvr_lightning.cli import main
from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import BusyError, SearchError
from tvr_lightning.search.files import find_videos
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource
from tvr_lightning.search.vectors import open_vectors, update_vectors

NOBODY = 65534


def content(folder):
    """Everything that an index contains about its videos."""
    catalog = Catalog(folder)
    found = {}
    for row in catalog.videos():
        span = catalog.spans(row.id)[0].key
        features, times = catalog.features(span, "clip4clip")
        picture = catalog.thumbnail(row.id, 0.0)
        found[row.path.name] = (span, row.duration, features.frames.numpy().tobytes(), times.tolist(), picture)
    skipped = catalog.skipped()
    catalog.close()
    return found, skipped


def make(folder, out, sources, **options):
    return index([folder], out, sources[1:], batch_size=2, progress=False, **options)


def test_only_what_is_new_changed_or_gone_is_touched(gallery, tmp_path, sources):
    folder, out = tmp_path / "videos", tmp_path / "index"
    shutil.copytree(gallery, folder)
    assert make(folder, out, sources).added == 8
    before, _ = content(out)
    again = index([], out, progress=False)
    assert (again.added, again.kept, again.removed, again.total) == (0, 8, 0, 8)
    write_clip(folder / "clip0.mp4", 20)
    write_clip(folder / "new.mp4", 21)
    (folder / "below" / "clip7.mp4").unlink()
    report = make(folder, out, sources)
    assert (report.added, report.kept, report.removed, report.total) == (2, 6, 1, 8)
    after, _ = content(out)
    assert set(after) == set(before) - {"clip7.mp4"} | {"new.mp4"}
    assert [name for name in after if after[name] != before.get(name)] == ["clip0.mp4", "new.mp4"]


def test_unreadable_videos_are_listed_and_the_others_go_on(gallery, tmp_path, sources):
    folder, out = tmp_path / "videos", tmp_path / "index"
    shutil.copytree(gallery, folder)
    (folder / "fake.mp4").write_text("<html>I am an mp4</html>")
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


def test_a_folder_without_permission_is_named_and_loses_nothing(checkpoints):
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        parent, folder = Path(name), Path(name) / "videos"
        parent.chmod(0o755)
        write_clip(folder / "a.mp4", 1)
        write_clip(folder / "closed" / "b.mp4", 2)
        source = ScorerSource(str(shutil.copy(checkpoints["clip4clip"], parent / "method.ckpt")))
        index([folder], parent / "index", [source], progress=False)
        for path in ((parent / "index"), *(parent / "index").iterdir()):
            os.chown(path, NOBODY if user == 0 else -1, -1)
        (folder / "closed").chmod(0)
        os.seteuid(NOBODY if user == 0 else user)  # root reads everything
        try:
            report = index([folder], parent / "index", progress=False)
        finally:
            os.seteuid(user)
            (folder / "closed").chmod(stat.S_IRWXU)
        assert any("closed: Permission denied" in problem for problem in report.problems)
        assert (report.kept, report.removed, report.total) == (1, 0, 2)


def test_two_writers_at_once(gallery, tmp_path, sources, indexed):
    import fcntl

    out = tmp_path / "index"
    out.mkdir()
    with (out / "writer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="Another process is writing the index"):
            make(gallery, out, sources)
    assert make(gallery, out, sources).total == 8


def test_on_a_disk_without_file_locks_the_index_is_written_with_a_warning(gallery, tmp_path, sources, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="without file locks .*do not start a second process for the index"):
        assert make(gallery, tmp_path / "index", sources).total == 8


def test_other_weights_are_refused_with_both_fingerprints(indexed, gallery, sources, tmp_path):
    copy = tmp_path / "index"
    shutil.copytree(indexed, copy)
    with pytest.raises(SearchError, match="created with gare, clip4clip, but you named clip4clip"):
        index([gallery], copy, sources[1:], progress=False)
    catalog = Catalog(copy)
    facts = catalog.fact("scorers")
    facts[0]["fingerprint"]["weights"] = "0" * 16
    catalog.set_fact("scorers", facts)
    catalog.close()
    with pytest.raises(SearchError, match=r"weights: the index has '0{16}', this run '[0-9a-f]{16}'\. Use"):
        Searcher(copy)
    with pytest.raises(SearchError, match=r"weights: the index has '0{16}', this run '[0-9a-f]{16}'\. Use"):
        index([gallery], copy, sources, progress=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: folder.rmdir(), "contains no index"),
        (lambda folder: (folder / "catalog.sqlite").write_bytes(b"no database" * 100), "damaged"),
        (lambda folder: Catalog(folder, create=True).close(), "indexing has not started"),
    ],
)
def test_what_is_no_index(tmp_path, change, said):
    folder = tmp_path / "index"
    folder.mkdir()
    change(folder)
    with pytest.raises(SearchError, match=said):
        Searcher(folder)


def test_nothing_to_index(tmp_path, sources, gallery):
    with pytest.raises(SearchError, match="no such file or folder"):
        make(tmp_path / "nowhere", tmp_path / "a", sources)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SearchError, match="no videos in"):
        make(tmp_path / "empty", tmp_path / "b", sources)
    with pytest.raises(SearchError, match="needs a checkpoint or weights"):
        index([gallery], tmp_path / "c", progress=False)
    with pytest.raises(SearchError, match="no vector store"):
        make(gallery, tmp_path / "d", sources, store="elastic")


def test_a_searcher_sees_what_is_indexed_meanwhile(gallery, tmp_path, sources):
    folder, out = tmp_path / "videos", tmp_path / "index"
    shutil.copytree(gallery / "below", folder)
    make(folder, out, sources)
    with Searcher(out) as searcher:
        assert len(find(searcher, "a cat").results) == 2
        write_clip(folder / "more.mp4", 9)
        make(folder, out, sources)
        found = find(searcher, "a cat").results
        assert len(found) == 3
        (folder / "more.mp4").unlink()
        make(folder, out, sources)
        assert len(find(searcher, "a cat").results) == 2


def test_a_store_that_was_left_behind_catches_up(indexed, tmp_path, qdrant):
    copy = tmp_path / "index"
    shutil.copytree(indexed, copy)
    catalog = Catalog(copy)
    store = open_vectors(catalog, qdrant)
    store.add([1, 2], torch.eye(2, 64))
    update_vectors(store, catalog)
    assert store.keys() == catalog.keys()
    store.close()
    catalog.close()


def written(folder):
    """Return the number of videos in an index that another process may be writing."""
    if not (folder / "catalog.sqlite").is_file():
        return 0
    catalog = Catalog(folder)
    count = len(catalog.keys())
    catalog.close()
    return count


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
    folder = tmp_path / "videos"
    for number in range(40):
        write_clip(folder / f"{number:02d}.mp4", number)
    make(folder, tmp_path / "whole", sources)
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(folder),
        str(tmp_path / "killed"),
        str(checkpoints["clip4clip"]),
    ]
    generator, partial = random.Random(0), 0
    for _ in range(4):
        process = ended(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
        process.stdout.readline()
        goal = written(tmp_path / "killed") + generator.randint(1, 6)
        while written(tmp_path / "killed") < goal and process.poll() is None:
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        partial += 0 < written(tmp_path / "killed") < 40
    assert partial, "no kill fell into the run"
    assert make(folder, tmp_path / "killed", sources).total == 40
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    catalog = Catalog(tmp_path / "killed")
    assert open_vectors(catalog).keys() == catalog.keys()
    catalog.close()


@pytest.mark.parametrize("there", [False, True])
def test_what_cannot_become_an_index_leaves_nothing_and_says_so(
    tmp_path, checkpoints, gallery, there, capsys, user_state
):
    remembered = list(user_state.rglob("*.json"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "fake.mp4").write_text("<html>I am an mp4</html>")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "index"
    if there:
        out.mkdir()
    ckpt = ["--ckpt_path", str(checkpoints["clip4clip"])]
    for words, said in (
        ([str(tmp_path / "broken"), *ckpt], "no video could be read: " + str(tmp_path / "broken" / "fake.mp4")),
        ([str(tmp_path / "empty"), *ckpt], "no videos in"),
        ([*ckpt], "No videos are given"),
        ([str(gallery), "--ckpt_path", str(tmp_path / "nowhere.ckpt")], "no such file"),
        ([str(gallery), *ckpt, "--store", "elastic"], "no vector store"),
    ):
        assert main(["index", *words, "--out", str(out)]) == (
            2 if said in ("no such file", "No videos are given") else 1
        )
        printed = capsys.readouterr()
        assert said in printed.err
        assert "tvr search" not in printed.out
        assert list(out.iterdir()) == [] if there else not out.exists()
    assert list(user_state.rglob("*.json")) == remembered


def test_a_new_index_refuses_a_folder_with_other_files_before_weights_are_loaded(gallery, tmp_path, capsys):
    out = tmp_path / "index"
    write_foreign_files(out)
    (tmp_path / "nowhere.ckpt").write_text("no weights")
    assert main(["index", str(gallery), "--out", str(out), "--ckpt_path", str(tmp_path / "nowhere.ckpt")]) == 2
    said = capsys.readouterr().err
    assert f"{out} contains files that are not part of an index (catalog.sqlite.bak, vectors.d, vectors.txt)" in said
    assert "Choose a new or empty folder with --out." in said
    assert len(said.splitlines()) == 1
    assert foreign_files_are_intact(out)
    assert len(list(out.iterdir())) == 3


def test_a_database_of_another_program_is_refused_and_unchanged(gallery, tmp_path, checkpoints, capsys):
    out = tmp_path / "index"
    out.mkdir()
    with contextlib.closing(sqlite3.connect(out / "catalog.sqlite")) as other, other:
        other.execute("CREATE TABLE books (title TEXT)")
    before = (out / "catalog.sqlite").read_bytes()
    assert main(["index", str(gallery), "--out", str(out), "--ckpt_path", str(checkpoints["clip4clip"])]) == 2
    assert "catalog.sqlite is a database of another program" in capsys.readouterr().err
    with pytest.raises(SearchError, match="database of another program"):
        Searcher(out)
    assert (out / "catalog.sqlite").read_bytes() == before


def checkpoint_that(code, checkpoints, folder):
    """A checkpoint whose encoder's module runs some code when it is imported: an event during `tvr index`."""
    (folder / "eventful.py").write_text(
        f"import os, sys\nfrom tvr_lightning.encoders import TinyClipEncoder\n{code}\n"
        "class Encoder(TinyClipEncoder):\n    pass\n"
    )
    content = torch.load(checkpoints["clip4clip"])
    content["hyper_parameters"]["encoder"]["class_path"] = "eventful.Encoder"
    torch.save(content, folder / "eventful.ckpt")
    return ["--ckpt_path", str(folder / "eventful.ckpt"), "--trust", "eventful"]


@pytest.mark.parametrize("new_folder", [True, False])
def test_a_failed_index_removes_nothing_that_the_user_wrote_meanwhile(
    tmp_path, checkpoints, monkeypatch, capsys, new_folder
):
    monkeypatch.delitem(sys.modules, "eventful", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "fake.mp4").write_text("<html>I am an mp4</html>")
    out = tmp_path / "index"
    if not new_folder:
        out.mkdir()
    code = f"from search_parts import write_foreign_files\nwrite_foreign_files({str(out)!r})"
    weights = checkpoint_that(code, checkpoints, tmp_path)
    assert main(["index", str(tmp_path / "videos"), "--out", str(out), *weights])
    assert "no video could be read" in capsys.readouterr().err
    assert foreign_files_are_intact(out)
    assert len(list(out.iterdir())) == 3, "what the run itself made is gone"


@pytest.mark.parametrize("new_folder", [True, False])
def test_a_failure_after_a_kill_removes_nothing_of_the_user(
    gallery, tmp_path, checkpoints, monkeypatch, capsys, new_folder
):
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "index"
    if not new_folder:
        out.mkdir()
    weights = checkpoint_that("os.kill(os.getpid(), 9)", checkpoints, tmp_path)
    assert forked.tvr(["index", str(gallery), "--out", str(out), *weights], tmp_path).returncode == -9
    assert (out / "catalog.sqlite").is_file()
    write_foreign_files(out)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "fake.mp4").write_text("<html>I am an mp4</html>")
    ckpt = ["--out", str(out), "--ckpt_path", str(checkpoints["clip4clip"])]
    assert main(["index", str(tmp_path / "videos"), *ckpt])
    assert "no video could be read" in capsys.readouterr().err
    assert foreign_files_are_intact(out)
    assert main(["index", str(gallery), *ckpt]) == 0
    assert foreign_files_are_intact(out)


def clips(folder, count):
    return [write_clip(folder / f"{number:02d}.mp4", number, frames=2) for number in range(count)]


def listed(out):
    with contextlib.closing(Catalog(out)) as catalog:
        return {row.path.name for row in catalog.videos()}


@pytest.mark.parametrize("prune", [[], ["--prune"]])
def test_an_unmounted_disk_removes_nothing(gallery, tmp_path, sources, capsys, prune):
    disk, other, out = tmp_path / "disk", tmp_path / "other", tmp_path / "index"
    shutil.copytree(gallery, disk)
    clips(other, 2)
    index([disk, other], out, sources[1:], progress=False)
    before = content(out)
    disk.rename(tmp_path / "unmounted")
    disk.mkdir()
    assert main(["index", "--out", str(out), *prune]) == 0
    said = capsys.readouterr().out
    assert "0 videos added, 2 kept, 0 removed; 10 in the index" in said
    assert f"{disk}: contains none of its 8 indexed videos, which stay in the index. Mount its disk" in said
    assert content(out) == before
    write_clip(other / "new.mp4", 9)
    assert main(["index", "--out", str(out), *prune]) == 0
    assert "1 videos added, 2 kept, 0 removed; 11 in the index" in capsys.readouterr().out, (
        "the other folder is updated"
    )
    disk.rmdir()
    (tmp_path / "unmounted").rename(disk)
    assert main(["index", "--out", str(out), *prune]) == 0
    assert "0 videos added, 11 kept, 0 removed; 11 in the index" in capsys.readouterr().out


def test_removing_much_of_an_index_requires_prune(tmp_path, sources, capsys):
    folder, out = tmp_path / "videos", tmp_path / "index"
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


def test_one_video_of_a_small_index_is_removed_without_prune_and_two_are_not(tmp_path, sources):
    folder, out = tmp_path / "videos", tmp_path / "index"
    paths = clips(folder, 5)
    make(folder, out, sources)
    paths[0].unlink()
    assert make(folder, out, sources).removed == 1
    for path in paths[1:3]:
        path.unlink()
    with pytest.raises(SearchError, match="2 of the 4 videos"):
        make(folder, out, sources)
    assert make(folder, out, sources, prune=True).removed == 2
    assert listed(out) == {"03.mp4", "04.mp4"}


def test_videos_that_moved_within_their_folder_replace_the_old_ones_with_prune(tmp_path, sources):
    folder, out = tmp_path / "videos", tmp_path / "index"
    paths = clips(folder, 3)
    make(folder, out, sources)
    (folder / "2024").mkdir()
    for path in paths:
        path.rename(folder / "2024" / path.name)
    report = make(folder, out, sources)
    assert (report.added, report.removed, report.total) == (3, 0, 6)
    assert any("contains none of its 3 indexed videos" in problem for problem in report.problems)
    assert make(folder, out, sources, prune=True).removed == 3
    assert listed(out) == {path.name for path in paths}


def test_unreadable_videos_that_are_gone_need_no_prune(gallery, tmp_path, sources):
    folder, out = tmp_path / "videos", tmp_path / "index"
    shutil.copytree(gallery, folder)
    for number in range(4):
        (folder / f"fake{number}.mp4").write_text("<html>I am an mp4</html>")
    assert len(make(folder, out, sources).skipped) == 4
    for path in folder.glob("fake*"):
        path.unlink()
    report = make(folder, out, sources)
    assert (report.kept, report.total, report.skipped) == (8, 8, [])


def test_an_index_without_readable_videos_says_so(tmp_path, sources, capsys):
    folder, out = tmp_path / "videos", tmp_path / "index"
    write_clip(folder / "a.mp4", 1)
    make(folder, out, sources)
    (folder / "a.mp4").write_text("<html>I am an mp4</html>")
    assert main(["index", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "contains no videos" in printed
    assert "Next:" not in printed
    write_clip(folder / "a.mp4", 1)
    assert main(["index", "--out", str(out)]) == 0


@contextlib.contextmanager
def largest_file(size):
    """Limit the size of files of this process; writing more fails as on a full disk."""
    resource = pytest.importorskip("resource", reason="only Unix limits the size of files")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_a_batch_and_ends_in_a_sentence(gallery, tmp_path, checkpoints, capsys):
    ckpt, whole = (
        ["--ckpt_path", str(checkpoints["clip4clip"]), "--batch_size", "2"],
        tmp_path / "whole",
    )
    assert main(["index", str(gallery), "--out", str(whole), *ckpt]) == 0
    kept = set()
    size = max(path.stat().st_size for path in whole.iterdir())
    for share in (0.0, 0.5, 0.7, 0.8, 0.9, 1.0):
        out = tmp_path / f"index-{share}"
        with largest_file(int(share * size)):
            status = main(["index", str(gallery), "--out", str(out), *ckpt])
        said = capsys.readouterr().err
        if status:
            assert "cannot be" in said
            assert "written" in said
            assert len(said.strip().splitlines()) == 1
        before = written(out)
        kept.add(before)
        assert out.exists() == bool(before), "an index without videos is none"
        assert main(["index", str(gallery), "--out", str(out), *ckpt]) == 0
        assert f"{8 - before} videos added, {before} kept" in capsys.readouterr().out
        assert content(out) == content(whole)
    assert 0 in kept
    assert kept & set(range(1, 8)), "no limit fell into the run"


def test_a_full_disk_under_the_vectors_ends_in_a_sentence(gallery, tmp_path, checkpoints, sources, capsys):
    pytest.importorskip("lancedb", reason="the extra `search` is not installed")
    out = tmp_path / "index"
    make(gallery, out, sources)
    shutil.rmtree(out / "vectors.lance")
    with contextlib.closing(Catalog(out)) as catalog:
        store = open_vectors(catalog)
        with largest_file(200), pytest.raises(SearchError, match=r"LanceDB cannot write to it .*rerun tvr index"):
            update_vectors(store, catalog)
    assert make(gallery, out, sources, store="lancedb").kept == 8
    with Searcher(out) as searcher:
        assert len(find(searcher, "a").results) == 8
