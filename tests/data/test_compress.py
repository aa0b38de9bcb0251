"""`tvr data compress`: a dataset to train from that is the same but small, and never silently stale."""

import json
import resource
import shutil
import time
from pathlib import Path

import pytest
from broken_videos import cut_off
from child_processes import fork

from tvr_lightning.cli import main
from tvr_lightning.data import MSRVTT, VideoFolder
from tvr_lightning.data.compress import MANIFEST, compress_dataset, read_copies
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.errors import UserError
from tvr_lightning.media.compression import Compression
from tvr_lightning.media.video import probe

HOW = Compression(fps=2, size=32)
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def originals(msrvtt: Path, tmp_path: Path) -> Path:
    shutil.copytree(msrvtt / "msrvtt", tmp_path / "originals" / "msrvtt")
    return tmp_path / "originals"


@pytest.fixture
def copies(originals: Path, tmp_path: Path) -> Path:
    again(originals, tmp_path / "copies")
    return tmp_path / "copies"


def options_of(originals: Path, out: Path) -> list[str]:
    return [f"--config={RECIPES / 'data' / 'msrvtt.yaml'}", f"--data.init_args.root={originals}", f"--out={out}",
            "--num_workers=1"]  # fmt: skip


def again(originals: Path, out: Path, how: Compression = HOW):
    return compress_dataset(MSRVTT(root=str(originals)), out, how, progress=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "msrvtt" / "videos").iterdir())}


def videos(root: Path) -> list[Path]:
    return [video.path for video in MSRVTT(root=str(root)).load_split("train").videos]


def test_copies_have_the_ids_layout_and_captions_of_their_originals_and_train(originals, copies):
    before, after = (MSRVTT(root=str(root), frames=3, batch_size=4, num_workers=0) for root in (originals, copies))
    for name in ("train", "test"):
        one, other = before.load_split(name), after.load_split(name)
        assert other.texts == one.texts
        assert [v.video_id for v in other.videos] == [v.video_id for v in one.videos]
        assert [v.path.relative_to(copies) for v in other.videos] == [v.path.relative_to(originals) for v in one.videos]
    assert after.warnings == before.warnings == [SYNTHETIC]
    assert before.copies is None
    assert after.copies.how.describe() == "compressed 2 fps 32"
    info = probe(videos(copies)[0])
    assert (min(info.width, info.height), info.has_audio) == (32, True)
    batch = next(iter(after.train_dataloader()))
    assert batch.video.video.pixels.shape == (4, 3, 3, 224, 224)


def test_the_same_command_makes_only_what_changed(originals, copies):
    before = {path: path.stat().st_mtime_ns for path in videos(copies)}
    sources = videos(originals)
    sources[3].touch()  # which changes no byte
    done = again(originals, copies)
    assert (done.new, done.redone, done.unread) == (0, [], [])
    assert {path: path.stat().st_mtime_ns for path in videos(copies)} == before
    shutil.copy(sources[1], sources[0])
    with pytest.raises(UserError, match=rf"its original {sources[0]} has changed.*again.*tvr data compress"):
        videos(copies)
    annotations = originals / "msrvtt" / "MSRVTT_JSFUSION_test.csv"
    annotations.write_text(annotations.read_text().replace("circle", "disc") + "\n")
    done = again(originals, copies)
    assert (done.new, len(done.redone)) == (2, 2)
    assert f"its source {sources[0]} has changed" in " ".join(done.redone)
    assert videos(copies)[0].read_bytes() == videos(copies)[1].read_bytes()
    assert (copies / "msrvtt" / annotations.name).read_bytes() == annotations.read_bytes()


def test_a_copy_that_changed_is_made_again(originals, copies):
    path, whole = videos(copies)[2], contents(copies)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert again(originals, copies).redone == [f"{path}: it had changed"]
    assert contents(copies) == whole
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=rf"{path}: it has 1,000 bytes, but [\d,]+ were written"):
        videos(copies)
    assert again(originals, copies).redone == [f"{path}: it had changed"]
    assert contents(copies) == whole


def test_folders_that_contain_something_else_are_refused(originals, copies, tmp_path):
    with pytest.raises(UserError, match="contains copies compressed 2 fps 32, bicubic, not compressed 3 fps 32"):
        again(originals, copies, Compression(fps=3, size=32))
    with pytest.raises(UserError, match="is the folder of the originals"):
        again(originals, originals)
    with pytest.raises(UserError, match="already contains copies"):
        again(copies, tmp_path / "third")
    manifest = copies / "msrvtt" / MANIFEST
    whole = manifest.read_text()
    manifest.write_text("".join(line for line in whole.splitlines(keepends=True) if "video3.mp4" not in line))
    with pytest.raises(UserError, match=r"video3\.mp4: it is not in compressed\.jsonl"):
        [MSRVTT(root=str(copies)).load_split(name) for name in ("train", "test")]
    manifest.write_text(whole.replace('"source"', '"origin"'))
    with pytest.raises(UserError, match="is damaged"):
        videos(copies)


def test_after_a_kill_the_same_command_goes_on(originals, copies, tmp_path, ended):
    out = tmp_path / "killed"
    running = ended(fork(again, originals, out))
    manifest = out / "msrvtt" / MANIFEST
    while not manifest.is_file() or manifest.read_bytes().count(b".mp4") < 6:
        assert running.is_alive()
        time.sleep(0.01)
    running.kill()
    running.join()
    with manifest.open("ab") as file:
        file.write(b'{"copy": "videos/vid')  # a line that was cut
    (out / "msrvtt" / "videos" / "video99.mp4.writing").write_bytes(b"half")
    done = again(originals, out)
    assert done.kept >= 3
    assert done.new > 0
    (out / "msrvtt" / "videos" / "video99.mp4.writing").unlink()
    assert contents(out) == contents(copies)
    assert videos(out)


def test_a_disk_that_fills_up_is_a_sentence_and_loses_nothing(originals, copies, tmp_path):
    whole, out = contents(copies), tmp_path / "full"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sizes = sorted(len(content) for content in whole.values())
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) - 1, limits[1]))
    try:
        with pytest.raises(UserError, match=r"\.mp4 cannot be written: File too large.*rerun the command"):
            again(originals, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.suffix for path in (out / "msrvtt" / "videos").iterdir()} <= {".mp4"}
    kept = len(read_copies(out / "msrvtt").files)
    assert again(originals, out).kept == kept
    assert contents(out) == whole


def test_a_video_that_cannot_be_read_is_named_and_the_others_are_copied(originals, tmp_path, capsys):
    cut, gone = videos(originals)[:2]
    cut_off(cut, 0.5)
    gone.unlink()
    shape = ["--fps=2", "--size=32", "--frames=jpeg"]
    assert main(["data", "compress", *options_of(originals, tmp_path / "out"), *shape]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("skipped")] == [
        next(line for line in said if str(cut) in line),
        f"skipped: {gone}: there is no such file",
    ]
    assert said[-1] == f"next: train with --data.init_args.root={tmp_path / 'out'}"
    assert len(contents(tmp_path / "out")) == 14
    data = MSRVTT(root=str(tmp_path / "out"), on_corrupt="skip")
    assert len(data.load_split("train").videos) == 10
    assert data.copies.how.describe() == "compressed 2 fps 32 jpeg"


def test_the_command_makes_copies_like_clip4clip_and_names_contradictions(originals, tmp_path, capsys):
    command = ["data", "compress", *options_of(originals, tmp_path / "out"), "--like=clip4clip"]
    assert main([*command, "--fps=4"]) == 1
    assert "Omit --fps" in capsys.readouterr().err
    assert main(command) == 0
    assert main([*command[:-1]]) == 1
    assert "contains copies compressed 3 fps 224 like clip4clip" in capsys.readouterr().err


def test_videos_of_one_s_own_are_copied_with_their_table(originals, tmp_path):
    folder = tmp_path / "own"
    (folder / "videos" / "deep").mkdir(parents=True)
    sources = videos(originals)
    for name, source in (("a.mp4", sources[0]), ("b.mov", sources[1]), ("deep/c.mp4", sources[2])):
        shutil.copy(source, folder / "videos" / name)
    rows = ["video,caption,split", "a.mp4,a thing,train", "b.mov,another,train", "videos/deep/c.mp4,third,test"]
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")
    done = compress_dataset(VideoFolder(root=str(folder)), tmp_path / "out", HOW, progress=False)
    assert (done.unread, done.new) == ([], 4)
    data = VideoFolder(root=str(tmp_path / "out"))
    found = [video.path.relative_to(tmp_path / "out").as_posix() for video in data.load_split("train").videos]
    assert found == ["videos/a.mp4", "videos/b.mp4"]


def test_the_card_says_that_the_run_saw_copies(originals, copies, tmp_path, capsys):
    options = [
        f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={RECIPES / 'fixture.yaml'}",
        f"--data.init_args.root={copies}", "--data.init_args.batch_size=4", "--data.init_args.num_workers=0",
        "--data.init_args.frames=2", "--trainer.accelerator=cpu", "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=1", f"--results.directory={tmp_path / 'runs'}",
    ]  # fmt: skip
    assert main(["fit", *options]) == 0
    assert "data: compressed 2 fps 32" in capsys.readouterr().out
    (results,) = (tmp_path / "runs").glob("*/version_0/results.json")
    assert json.loads(results.read_text())["preprocessing"]["data"] == "compressed 2 fps 32"
    assert "data: compressed 2 fps 32" in results.with_name("run.md").read_text()
