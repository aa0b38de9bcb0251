"""Splits that share videos are refused, so that no video is both trained on and evaluated on."""

import shutil

import pytest

from tvr_lightning.cli import main
from tvr_lightning.data import MSRVTT, MSVD
from tvr_lightning.data.check import check
from tvr_lightning.data.records import AnnotationError


def test_training_on_test_videos_is_refused(msrvtt, tmp_path, capsys):
    shutil.copytree(msrvtt, tmp_path, dirs_exist_ok=True)
    data = MSRVTT(root=str(tmp_path))
    train, videos = data.folder / "MSRVTT_train.9k.csv", data.read_split("test").videos
    ids = [video.video_id for video in videos]
    assert len(ids) == 4
    with train.open("a") as file:
        file.writelines(f"{name}\n" for name in ids)
    data = MSRVTT(root=str(tmp_path))
    message = rf"train and test: 4 videos are in both \({', '.join(ids)}\); remove them from one"
    for stage in ("fit", "validate", "test"):
        with pytest.raises(AnnotationError, match=message):
            data.setup(stage)
    found = [problem for problem in check(data, progress=False).problems if problem.kind == "split-overlap"]
    assert [problem.entry for problem in found] == [video.path.name for video in videos]
    options = ["--config=clip4clip", "--config=fixture", f"--data.init_args.root={tmp_path}"]
    assert main(["test", *options, "--trainer.accelerator=cpu", f"--results.directory={tmp_path / 'runs'}"]) == 2
    assert "tvr: " in capsys.readouterr().err
    assert not list((tmp_path / "runs").rglob("version_*"))
    train.write_text("no such column\n")
    MSRVTT(root=str(tmp_path)).setup("test")  # does not need the training list
    train.unlink()
    MSRVTT(root=str(tmp_path)).setup("test")


@pytest.mark.parametrize(("one", "other"), [("train", "val"), ("train", "test"), ("val", "test")])
def test_an_official_validation_split_must_not_share_videos(synthetic, tmp_path, one, other):
    shutil.copytree(synthetic("msvd", 8), tmp_path, dirs_exist_ok=True)
    listed = (tmp_path / "msvd" / f"{other}_list.txt").read_text().split()
    with (tmp_path / "msvd" / f"{one}_list.txt").open("a") as file:
        file.write(f"{listed[0]}\n")
    with pytest.raises(AnnotationError, match=rf"{one} and {other}: 1 video is in both \({listed[0]}\)"):
        MSVD(root=str(tmp_path)).setup("fit")
