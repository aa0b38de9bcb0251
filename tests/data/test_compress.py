"""`tvr data compress`: small copies of a dataset that are never silently out of date."""

import json
import shutil
from pathlib import Path

import pytest
from broken_videos import cut_off
from child_processes import fork, until
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.data import MSRVTT, VideoFolder
from tvr_lightning.data.compress import compress_dataset
from tvr_lightning.data.copies import MANIFEST, read_copies
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.errors import UserError
from tvr_lightning.media.compression import Compression
from tvr_lightning.media.video import probe

HOW = Compression(fps=2, size=32)


@pytest.fixture
def copies(built_once, msrvtt, own_data, tmp_path):
    """Copies of `own_data`: made once, with the folder of the originals changed in the manifest."""
    copies = shutil.copytree(built_once("compressed", lambda path: compress(msrvtt, path)), tmp_path / "copies")
    manifest = copies / "msrvtt" / MANIFEST
    manifest.write_text(manifest.read_text().replace(str(msrvtt / "msrvtt"), str(own_data / "msrvtt")))
    return copies


def compress(originals: Path, out: Path, how: Compression = HOW):
    return compress_dataset(MSRVTT(root=str(originals)), out, how)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "msrvtt" / "videos").iterdir())}


def videos(root: Path) -> list[Path]:
    return [video.path for video in MSRVTT(root=str(root)).load_split("train").videos]


def test_copies_have_the_ids_and_captions_of_their_originals_and_train(own_data, copies):
    before, after = (MSRVTT(root=str(root), frames=3, batch_size=4, num_workers=0) for root in (own_data, copies))
    for name in ("train", "test"):
        one, other = before.load_split(name), after.load_split(name)
        assert other.texts == one.texts
        assert [v.video_id for v in other.videos] == [v.video_id for v in one.videos]
        assert [v.path.relative_to(copies) for v in other.videos] == [v.path.relative_to(own_data) for v in one.videos]
    assert after.warnings == before.warnings == [SYNTHETIC]
    assert before.copies is None
    assert after.copies.how.describe() == "compressed 2 fps 32"
    info = probe(videos(copies)[0])
    assert (min(info.width, info.height), info.has_audio) == (32, True)
    batch = next(iter(after.train_dataloader()))
    assert batch.video.video.pixels.shape == (4, 3, 3, 224, 224)


def test_only_changed_files_are_copied_again(own_data, copies):
    before = {path: path.stat().st_mtime_ns for path in videos(copies)}
    sources = videos(own_data)
    sources[3].touch()  # its content is the same
    report = compress(own_data, copies)
    assert (report.new, report.redone, report.unread) == (0, [], [])
    assert {path: path.stat().st_mtime_ns for path in videos(copies)} == before
    shutil.copy(sources[1], sources[0])
    with pytest.raises(UserError, match=rf"its original {sources[0]} has changed.*again.*tvr data compress"):
        videos(copies)
    annotations = own_data / "msrvtt" / "MSRVTT_JSFUSION_test.csv"
    annotations.write_text(annotations.read_text().replace("circle", "disc") + "\n")
    report = compress(own_data, copies)
    assert (report.new, len(report.redone)) == (2, 2)
    assert f"its source {sources[0]} has changed" in " ".join(report.redone)
    assert videos(copies)[0].read_bytes() == videos(copies)[1].read_bytes()
    assert (copies / "msrvtt" / annotations.name).read_bytes() == annotations.read_bytes()


def test_damaged_copies_are_made_again(own_data, copies):
    path, whole = videos(copies)[2], contents(copies)
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
    for damaged in (flipped, content[:1000]):
        path.write_bytes(damaged)
        if len(damaged) == 1000:
            with pytest.raises(UserError, match=rf"{path}: it has 1,000 bytes, but [\d,]+ were written"):
                videos(copies)
        assert compress(own_data, copies).redone == [f"{path}: it had changed"]
        assert contents(copies) == whole


def test_folders_with_other_content_are_refused(own_data, copies, tmp_path):
    with pytest.raises(UserError, match="contains copies compressed 2 fps 32, bicubic, not compressed 3 fps 32"):
        compress(own_data, copies, Compression(fps=3, size=32))
    with pytest.raises(UserError, match="is the folder of the originals"):
        compress(own_data, own_data)
    with pytest.raises(UserError, match="already contains copies"):
        compress(copies, tmp_path / "third")
    manifest = copies / "msrvtt" / MANIFEST
    whole = manifest.read_text()
    manifest.write_text("".join(line for line in whole.splitlines(keepends=True) if "video3.mp4" not in line))
    with pytest.raises(UserError, match=r"video3\.mp4: it is not in compressed\.jsonl"):
        [MSRVTT(root=str(copies)).load_split(name) for name in ("train", "test")]
    manifest.write_text(whole.replace('"source"', '"origin"'))
    with pytest.raises(UserError, match="is damaged"):
        videos(copies)


def test_a_killed_command_resumes(own_data, copies, tmp_path, ended):
    out = tmp_path / "killed"
    running = ended(fork(compress, own_data, out))
    manifest, unfinished = out / "msrvtt" / MANIFEST, out / "msrvtt" / "videos" / "video99.mp4.writing"
    until(lambda: manifest.is_file() and manifest.read_bytes().count(b".mp4") > 5)
    running.kill()
    running.join()
    with manifest.open("ab") as file:
        file.write(b'{"copy": "videos/vid')  # a truncated line
    unfinished.write_bytes(b"half")
    report = compress(own_data, out)
    assert report.kept >= 3
    assert report.new > 0
    unfinished.unlink()
    assert contents(out) == contents(copies)
    assert videos(out)


def test_a_full_disk_loses_nothing(own_data, copies, tmp_path, limit_files):
    whole, out = contents(copies), tmp_path / "full"
    limit_files(max(map(len, whole.values())) - 1)
    with pytest.raises(UserError, match=r"\.mp4 cannot be written: File too large.*rerun the command"):
        compress(own_data, out)
    limit_files()
    assert contents(out).items() <= whole.items()
    kept = len(read_copies(out / "msrvtt").files)
    assert compress(own_data, out).kept == kept
    assert contents(out) == whole


def test_the_command_skips_unreadable_videos_and_refuses_contradictions(own_data, tmp_path, capsys):
    cut, gone = videos(own_data)[:2]
    cut_off(cut, 0.5)
    gone.unlink()
    out = tmp_path / "out"
    command = ["data", "compress", "--config=data/msrvtt", "--num_workers=1",
               f"--data.init_args.root={own_data}", f"--out={out}"]  # fmt: skip
    assert main([*command, "--like=clip4clip", "--fps=4"]) == 2
    assert "Omit --fps" in capsys.readouterr().err
    assert main([*command, "--fps=2", "--size=32"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("skipped")] == [
        next(line for line in lines if str(cut) in line),
        f"skipped: {gone}: there is no such file",
    ]
    assert lines[-1] == f"next: train with --data.init_args.root={out}"
    assert len(contents(out)) == 14
    data = MSRVTT(root=str(out), on_corrupt="skip")
    assert len(data.load_split("train").videos) == 10
    assert data.copies.how.describe() == "compressed 2 fps 32"
    assert main([*command, "--like=clip4clip"]) == 2
    assert "contains copies compressed 2 fps 32" in capsys.readouterr().err


def test_your_own_videos_are_copied_with_their_table(own_data, tmp_path):
    folder, out = tmp_path / "own", tmp_path / "out"
    (folder / "videos" / "deep").mkdir(parents=True)
    for name, source in zip(("a.mp4", "b.mov", "deep/c.mp4"), videos(own_data), strict=False):
        shutil.copy(source, folder / "videos" / name)
    rows = ["video,caption,split", "a.mp4,a thing,train", "b.mov,another,train", "videos/deep/c.mp4,third,test"]
    rows += ["clip_0.5,missing,train", "clip_0.7,missing,train"]  # whose names have no suffix
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")
    report = compress_dataset(VideoFolder(root=str(folder)), out, Compression(like="clip4clip"))
    missing = [f"{folder}/videos/clip_0.{number}: there is no such file" for number in (5, 7)]
    assert (report.unread, report.new) == (missing, 4)
    data = VideoFolder(root=str(out), on_corrupt="skip")
    found = [video.path.relative_to(out).as_posix() for video in data.load_split("train").videos]
    assert found == ["videos/a.mp4", "videos/b.mp4"]
    assert data.copies.how.describe() == "compressed 3 fps 224 like clip4clip"


def test_linked_annotations_and_captions_at_any_path_are_copied(own_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "linked" / "msrvtt"
    folder.mkdir(parents=True)
    for path in (own_data / "msrvtt").iterdir():
        (folder / path.name).symlink_to(path)
    train = MSRVTT(root=str(own_data)).read_split("train").videos
    rows = ["video_id,segment,caption", *(f"{video.video_id},0,a thing" for video in train)]
    for file in (tmp_path / "outside.csv", folder / "inside.csv"):
        file.write_text("\n".join(rows))
    out, inside = tmp_path / "out", folder / "inside.csv"
    for root, captions in (("linked", "outside.csv"), ("linked", inside), (folder.parent, "linked/msrvtt/inside.csv")):
        options = {"extra_captions": str(captions), "num_workers": 0, "batch_size": 2}
        report = compress_dataset(MSRVTT(root=str(root), **options), out, Compression(fps=1, size=16))
        assert report.unread == []
        assert (out / "msrvtt" / "inside.csv").is_file() == (captions != "outside.csv")
        copies = MSRVTT(root=str(out), **options)
        assert copies.read_split("train").texts == MSRVTT(root=str(own_data)).read_split("train").texts
        copies.train_dataloader()
        (out / "msrvtt" / "inside.csv").unlink(missing_ok=True)


def test_results_show_that_a_run_used_copies(copies, tmp_path, capsys):
    limits = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=1")
    assert main(["fit", *small_run(copies, tmp_path / "runs", *limits)]) == 0
    assert "data: compressed 2 fps 32" in capsys.readouterr().out
    (results,) = (tmp_path / "runs").glob("*/version_0/results.json")
    assert json.loads(results.read_text())["preprocessing"]["data"] == "compressed 2 fps 32"
    assert "data: compressed 2 fps 32" in results.with_name("run.md").read_text()
