"""No file is both trained on and evaluated on: splits that share videos are refused where a run starts."""

import shutil
from pathlib import Path

import pytest

from tvr_lightning.cli import main
from tvr_lightning.data import MSRVTT, MSVD
from tvr_lightning.data.check import check
from tvr_lightning.data.records import AnnotationError

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory, synthetic) -> Path:
    """Parent folder of a synthetic MSR-VTT whose 9k list also names all test videos, more than a message quotes."""
    root = tmp_path_factory.mktemp("overlapping")
    shutil.copytree(synthetic("msrvtt", 28), root, dirs_exist_ok=True)
    data = MSRVTT(root=str(root))
    with (data.folder / "MSRVTT_train.9k.csv").open("a") as file:
        file.writelines(f"{video.video_id}\n" for video in data.read_split("test").videos)
    return root


def test_training_on_test_videos_is_refused_with_their_ids(overlapping):
    data = MSRVTT(root=str(overlapping))
    videos = data.read_split("test").videos
    ids = [video.video_id for video in videos]
    assert len(ids) == 6
    named = rf"train and test: 6 videos are in both \({', '.join(ids[:5])} and 1 more\); remove them from one"
    for stage in ("fit", "validate", "test"):
        with pytest.raises(AnnotationError, match=named):
            data.setup(stage)
    found = [problem for problem in check(data, progress=False).problems if problem.kind == "split-overlap"]
    assert [problem.entry for problem in found] == [video.path.name for video in videos]


@pytest.mark.parametrize("command", ["fit", "test"])
def test_the_command_line_ends_with_one_sentence_and_leaves_no_run(overlapping, tmp_path, capsys, command):
    options = [f"--config={RECIPES / name}" for name in ("clip4clip.yaml", "fixture.yaml")]
    options += [f"--data.init_args.root={overlapping}", "--trainer.accelerator=cpu"]
    assert main([command, *options, f"--results.directory={tmp_path / 'runs'}"]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("tvr: "))
    assert "6 videos are in both" in line
    assert not list((tmp_path / "runs").rglob("version_*"))


def test_a_test_without_the_training_list_or_with_a_damaged_one_is_not_stopped(overlapping, tmp_path):
    shutil.copytree(overlapping / "msrvtt", tmp_path / "msrvtt")
    train = tmp_path / "msrvtt" / "MSRVTT_train.9k.csv"
    train.write_text("no such column\n")
    MSRVTT(root=str(tmp_path)).setup("test")
    train.unlink()
    MSRVTT(root=str(tmp_path)).setup("test")


@pytest.mark.parametrize(("one", "other"), [("train", "val"), ("train", "test"), ("val", "test")])
def test_an_official_validation_split_shares_no_video_either(synthetic, tmp_path, one, other):
    shutil.copytree(synthetic("msvd"), tmp_path, dirs_exist_ok=True)
    listed = (tmp_path / "msvd" / f"{other}_list.txt").read_text().split()
    with (tmp_path / "msvd" / f"{one}_list.txt").open("a") as file:
        file.write(f"{listed[0]}\n")
    with pytest.raises(AnnotationError, match=rf"{one} and {other}: 1 video is in both \({listed[0]}\)"):
        MSVD(root=str(tmp_path)).setup("fit")
