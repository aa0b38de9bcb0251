"""Untrusted input: names stay in their folder, checkpoints run no code, and bad releases are not installed."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.records import AnnotationError
from tvr_lightning.data.video_files import VideoFiles, path_below


@pytest.mark.parametrize("name", ["../secret", "/etc/secret", "movie/../../secret"])
def test_names_that_leave_the_folder_are_refused(name, tmp_path):
    (tmp_path / "secret.mp4").touch()
    (tmp_path / "videos").mkdir()
    with pytest.raises(AnnotationError, match="leads out of the folder"):
        VideoFiles(tmp_path / "videos", ".mp4").find(name)
    with pytest.raises(AnnotationError):
        path_below(tmp_path / "videos", name)


def test_names_with_dots_are_found_or_expected_in_the_folder(tmp_path):
    (tmp_path / "a..b.mp4").touch()
    videos = VideoFiles(tmp_path, ".mp4")
    assert videos.find("a..b") == tmp_path / "a..b.mp4"
    assert videos.find("..c") == tmp_path / "..c.mp4"


def test_an_annotation_file_cannot_name_a_video_elsewhere(msrvtt, tmp_path):
    shutil.copytree(msrvtt, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.mp4"))
    for file in (tmp_path / "msrvtt" / "MSRVTT_train.9k.csv", tmp_path / "msrvtt" / "MSRVTT_data.json"):
        file.write_text(re.sub(r"\bvideo0\b", "../../elsewhere", file.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(AnnotationError, match="elsewhere"):
        MSRVTT(root=str(tmp_path), frames=2, batch_size=2, num_workers=0).read_split("train")


class Trap:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_a_checkpoint_that_would_run_code_is_refused(msrvtt, tmp_path, capsys):
    torch.save({"state_dict": Trap(tmp_path / "ran")}, tmp_path / "evil.ckpt")
    assert main(["test", *small_run(msrvtt, tmp_path / "runs"), f"--ckpt_path={tmp_path / 'evil.ckpt'}"]) == 2
    assert re.search(r"evil\.ckpt: cannot be read as a checkpoint.*more than tensors", capsys.readouterr().err)
    assert not (tmp_path / "ran").exists()


def test_the_compromised_releases_of_lightning_are_excluded():
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    (pinned,) = re.findall(r'"(lightning[^"]*)"', project)
    assert {"!=2.6.2", "!=2.6.3"} <= set(pinned.split(","))
