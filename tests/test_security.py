"""Untrusted input: names stay in their folder, checkpoints run no code, and bad releases are not installed."""

import re
import shutil
from pathlib import Path

import pytest

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


def test_the_compromised_releases_of_lightning_are_excluded():
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    (pinned,) = re.findall(r'"(lightning[^"]*)"', project)
    assert {"!=2.6.2", "!=2.6.3"} <= set(pinned.split(","))
