import shutil
from pathlib import Path

import pytest

from tvr_lightning.data.lsmdc import DROPPED, LSMDC
from tvr_lightning.data.records import AnnotationError

ID = "1054_Harry_Potter_02.07.17.409-02.07.23.396"
OTHER = "0001_American_Beauty_00.00.51.926-00.00.54.129"


def line(clip: str, sentence: str) -> str:
    return "\t".join([clip, *["02.07.17.409"] * 4, sentence])


def write_excerpt(root: Path, *lines: str, file: str = "LSMDC16_annos_training.csv") -> Path:
    folder = root / "lsmdc"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("\n".join(lines) + "\n")
    movie = folder / "videos" / "1054_Harry_Potter"
    movie.mkdir(parents=True, exist_ok=True)
    (movie / f"{ID}.avi").touch()
    return folder


def test_a_training_clip_counts_with_each_of_its_sentences(tmp_path):
    folder = write_excerpt(
        tmp_path,
        line(ID, "SOMEONE smiles."),
        line(OTHER, 'He says "no".'),
        line(ID, "He leaves."),
        line(ID, "He leaves."),
    )
    split = LSMDC(root=str(tmp_path)).read_split("train")
    assert [(t.video, t.text) for t in split.texts] == [
        (0, "SOMEONE smiles."),
        (0, "He leaves."),
        (0, "He leaves."),
        (1, 'He says "no".'),
    ]
    assert [v.path for v in split.videos] == [
        folder / "videos" / "1054_Harry_Potter" / f"{ID}.avi",
        folder / "videos" / "0001_American_Beauty" / f"{OTHER}.avi",
    ]


@pytest.mark.parametrize(("split", "count"), [("lsmdc16", 3), ("xpool", 2), ("gaid", 1)])
def test_released_splits_leave_out_test_clips_only(tmp_path, split, count):
    lines = [line(clip, f"Sentence {place}.") for place, clip in enumerate([ID, *DROPPED["gaid"]])]
    write_excerpt(tmp_path, *lines)
    write_excerpt(tmp_path, *lines, file="LSMDC16_challenge_1000_publictect.csv")
    data = LSMDC(root=str(tmp_path), split=split)
    assert len(data.read_split("train").videos) == 3
    test = data.read_split("test")
    first, second = DROPPED["gaid"]
    assert [video.video_id for video in test.videos] == [ID, *(second, first)[: count - 1][::-1]]
    assert f"{997 + count:,} public test clips" in test.protocol


def test_a_clip_in_another_container_is_found_although_ids_contain_dots(tmp_path):
    folder = write_excerpt(tmp_path, line(OTHER, "He leaves."))
    (folder / "videos" / "0001_American_Beauty").mkdir()
    (folder / "videos" / "0001_American_Beauty" / f"{OTHER}.mp4").touch()
    assert LSMDC(root=str(tmp_path)).read_split("train").videos[0].path.name == f"{OTHER}.mp4"


@pytest.mark.parametrize(
    ("lines", "kind", "named"),
    [
        ([line(ID, "He leaves."), line(ID, "He leaves.")], "duplicate-id", "line 2: 1054_Harry_Potter"),
        ([line(ID, "He leaves."), "x\ty"], "malformed", "line 2: 2 columns"),
        ([line("1054_Harry_Potter", "He leaves."), line(ID, "x")], "malformed", "line 1: no clip id"),
        ([line(ID, " ")], "empty-caption", f"{ID}, caption 0"),
    ],
)
def test_contradictions_are_errors_that_name_file_and_line(tmp_path, lines, kind, named):
    write_excerpt(tmp_path, *lines, file="LSMDC16_challenge_1000_publictect.csv")
    with pytest.raises(AnnotationError) as caught:
        LSMDC(root=str(tmp_path)).read_split("test")
    assert [problem.kind for problem in caught.value.problems] == [kind]
    assert named in str(caught.value)


def test_the_real_test_file_has_the_published_size_with_any_line_ends(test_data, tmp_path):
    split = LSMDC(root=str(test_data / "annotations")).read_split("test")
    assert (len(split.videos), len(split.texts)) == (1000, 1000)
    assert all(v.path.parent.name + "_" in v.video_id for v in split.videos)
    shutil.copytree(test_data / "annotations" / "crlf" / "lsmdc", tmp_path / "lsmdc")
    assert LSMDC(root=str(tmp_path)).read_split("test").texts == split.texts
