import json
from pathlib import Path

import pytest

from tvr_lightning.data.didemo import DiDeMo
from tvr_lightning.data.records import AnnotationError


def write_excerpt(root: Path, moments: list[dict[str, str]], listed: str = "1@N08_a.mov\n2@N01_b.\n") -> Path:
    folder = root / "didemo"
    (folder / "videos").mkdir(parents=True)
    (folder / "test_list.txt").write_text(listed)
    (folder / "test_data.json").write_text(json.dumps(moments))
    for name in ("1@N08_a.mp4", "2@N01_b.mp4"):
        (folder / "videos" / name).touch()
    return folder


MOMENTS = [
    {"video": "2@N01_b.", "description": "a bug crawls.", "times": [[4, 4]]},
    {"video": "1@N08_a.mov", "description": "someone kicks\na bug", "times": [[0, 1]]},
    {"video": "9@N01_z.avi", "description": "not in the list", "times": [[0, 1]]},
    {"video": "2@N01_b.", "description": "it stops", "times": [[5, 5]]},
]


def test_descriptions_become_one_paragraph_in_file_order(tmp_path):
    folder = write_excerpt(tmp_path, MOMENTS)
    split = DiDeMo(root=str(tmp_path)).read_split("test")
    assert [(split.videos[t.video].video_id, t.text) for t in split.texts] == [
        ("1@N08_a.mov", "someone kicks a bug"),
        ("2@N01_b.", "a bug crawls. it stops"),
    ]
    assert [v.path for v in split.videos] == [folder / "videos" / "1@N08_a.mp4", folder / "videos" / "2@N01_b.mp4"]
    assert {v.span for v in split.videos} == {(0.0, 31.0)}


def test_a_listed_name_is_found_exactly_before_any_other_container(tmp_path):
    folder = write_excerpt(tmp_path, MOMENTS)
    (folder / "videos" / "1@N08_a.mov").touch()
    assert DiDeMo(root=str(tmp_path)).read_split("test").videos[0].path.name == "1@N08_a.mov"
    (folder / "videos" / "2@N01_b.avi").touch()
    with pytest.raises(AnnotationError, match=r"2@N01_b\.: several files match: 2@N01_b\.avi, 2@N01_b\.mp4"):
        DiDeMo(root=str(tmp_path)).read_split("test")


def test_missing_files_are_expected_under_the_listed_name(tmp_path):
    folder = write_excerpt(tmp_path, MOMENTS)
    (folder / "videos" / "1@N08_a.mp4").unlink()
    assert DiDeMo(root=str(tmp_path)).read_split("test").videos[0].path == folder / "videos" / "1@N08_a.mov"


def test_seconds_set_the_segment_that_is_read(tmp_path):
    write_excerpt(tmp_path, MOMENTS)
    for options, span in (({}, (0.0, 31.0)), ({"seconds": 5.0}, (0.0, 5.0)), ({"seconds": None}, None)):
        videos = DiDeMo(root=str(tmp_path), **options).read_split("test").videos
        assert {video.span for video in videos} == {span}
    with pytest.raises(ValueError, match="seconds is 0"):
        DiDeMo(root=str(tmp_path), seconds=0)


def test_the_paragraph_csv_reads_newlines_in_fields_and_absolute_paths(tmp_path):
    write_excerpt(tmp_path, [])
    (tmp_path / "didemo" / "tmass").mkdir()
    (tmp_path / "didemo" / "tmass" / "didemo_test_label.csv").write_text(
        "success,video_path,starts,ends,text,formatted_data\n"
        'True,/home/x/videos/2@N01_b.,tensor([[0]]),tensor([[31]]),"a bug, \ncrawls.\n it stops",/home/x/0.pth\n'
    )
    split = DiDeMo(root=str(tmp_path), split="tmass").read_split("test")
    assert [(v.video_id, v.path.name) for v in split.videos] == [("2@N01_b.", "2@N01_b.mp4")]
    assert [t.text for t in split.texts] == ["a bug, crawls. it stops"]


@pytest.mark.parametrize(
    ("moments", "listed", "kind", "named"),
    [
        (MOMENTS, "1@N08_a.mov\n3@N01_c.avi\n", "video-without-caption", "test_data.json: 3@N01_c.avi"),
        (
            [*MOMENTS, {"video": "2@N01_b.", "description": " "}],
            "2@N01_b.\n",
            "empty-caption",
            "json: 2@N01_b., caption 2",
        ),
        (MOMENTS, "2@N01_b.\n2@N01_b.\n", "duplicate-id", "test_list.txt: 2@N01_b."),
        ([{"video": "2@N01_b."}], "2@N01_b.\n", "malformed", "[0]: the key 'description' is missing"),
    ],
)
def test_contradictions_are_errors_that_name_file_and_entry(tmp_path, moments, listed, kind, named):
    write_excerpt(tmp_path, moments, listed)
    with pytest.raises(AnnotationError) as caught:
        DiDeMo(root=str(tmp_path)).read_split("test")
    assert [problem.kind for problem in caught.value.problems] == [kind]
    assert named in str(caught.value)


def test_real_splits_have_the_published_sizes(test_data):
    data = DiDeMo(root=str(test_data / "annotations"))
    for name, size in {"val": 1065, "test": 1004}.items():
        split = data.read_split(name)
        assert (len(split.videos), len(split.texts)) == (size, size)
    assert len((data.folder / "train_list.txt").read_text().split()) == 8392
    assert data.validation == "official"
    csv = DiDeMo(root=str(test_data / "annotations"), split="tmass")
    assert [len(csv.read_split(name).texts) for name in ("train", "val", "test")] == [8362, 1062, 1004]


def test_joined_paragraphs_equal_those_of_the_csv(test_data):
    paragraphs = []
    for kind in ("lists", "tmass"):
        split = DiDeMo(root=str(test_data / "annotations"), split=kind).read_split("test")
        paragraphs.append({split.videos[t.video].video_id: t.text for t in split.texts})
    assert paragraphs[0] == paragraphs[1]
