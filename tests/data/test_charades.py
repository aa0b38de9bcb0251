from pathlib import Path

import pytest

from tvr_lightning.data.charades import Charades
from tvr_lightning.data.records import AnnotationError

TABLE = """\
id,subject,scene,quality,relevance,verified,script,objects,descriptions,actions,length
46GP8,HR43,Kitchen,6,7,Yes,"A person cooks, then sneezes.",food;stove,A person cooks.,c092 11.90 21.20,24.83
N11GT,0KZ7,Stairs,6,7,Yes,One person opens a blanket.,blanket,{},c098 8.60 14.20,12.17
"""
MOMENTS = """\
N11GT 1.0 8.5##a person shakes a blanket.
46GP8 0.0 6##person cooks.
N11GT 1.0 8.5##the person folds it.
46GP8 20.9 12.0##person sneezes.
N11GT 38.0 13.0##person opens the cabinet.
"""


def write_excerpt(root: Path, table: str = TABLE, moments: str = MOMENTS) -> Path:
    folder = root / "charades"
    (folder / "videos").mkdir(parents=True)
    (folder / "Charades_v1_test.csv").write_text(table)
    (folder / "charades_sta_test.txt").write_text(moments)
    return folder


def test_scripts_are_one_text_per_video(tmp_path):
    folder = write_excerpt(tmp_path)
    data = Charades(root=str(tmp_path))
    split = data.read_split("test")
    assert [(split.videos[t.video].video_id, t.text) for t in split.texts] == [
        ("46GP8", "A person cooks, then sneezes."),
        ("N11GT", "One person opens a blanket."),
    ]
    assert split.videos[0].path == folder / "videos" / "46GP8.mp4"
    assert split.videos[0].span is None
    assert data.validation == "test"


def test_spans_are_items_with_all_their_sentences(tmp_path):
    write_excerpt(tmp_path)
    split, findings = Charades(root=str(tmp_path), split="sta").examine_split("test")
    assert [(v.path.stem, v.span) for v in split.videos] == [
        ("N11GT", (1.0, 8.5)),
        ("46GP8", (0.0, 6.0)),
        ("46GP8", (12.0, 20.9)),  # its end stood before its start
        ("N11GT", (0.0, 12.17)),  # outside the video
    ]
    assert len({v.video_id for v in split.videos}) == 4
    assert [(t.video, t.text) for t in split.texts][:2] == [
        (0, "a person shakes a blanket."),
        (0, "the person folds it."),
    ]
    assert findings.problems == []
    assert [note.entry for note in findings.notes] == ["line 4", "line 5"]


@pytest.mark.parametrize(
    ("split", "table", "moments", "kind", "named"),
    [
        ("scripts", TABLE.replace("One person opens a blanket.", "{}"), "", "empty-caption", "N11GT, caption 0"),
        ("scripts", TABLE.replace("One person opens a blanket.", ""), "", "empty-caption", "N11GT, caption 0"),
        ("scripts", TABLE.replace("N11GT", "46GP8"), "", "duplicate-id", "46GP8: the id occurs 2 times"),
        ("scripts", TABLE.replace("script", "text"), "", "malformed", "column 'script' is missing"),
        ("sta", TABLE, "46GP8 0.0 1.0##\n", "empty-caption", "caption 0"),
        ("sta", TABLE, MOMENTS + "46GP8 0.0##x\n", "malformed", "line 6: cannot be read"),
        ("sta", TABLE, MOMENTS + "XXXXX 0.0 1.0##x\n", "caption-without-video", "line 6: sentence for XXXXX"),
        ("sta", TABLE.replace("24.83", "long"), MOMENTS, "malformed", "46GP8: length 'long' is not a number"),
    ],
)
def test_contradictions_are_errors_that_name_file_and_entry(tmp_path, split, table, moments, kind, named):
    write_excerpt(tmp_path, table, moments)
    with pytest.raises(AnnotationError) as caught:
        Charades(root=str(tmp_path), split=split).read_split("test")
    assert [problem.kind for problem in caught.value.problems] == [kind]
    assert named in str(caught.value)


def test_real_splits_have_the_published_sizes(test_data):
    root = str(test_data / "annotations")
    scripts, spans = Charades(root=root), Charades(root=root, split="sta")
    for name, videos, sentences in (("train", 7985, 12_408), ("test", 1863, 3720)):
        split = scripts.read_split(name)
        assert (len(split.videos), len(split.texts)) == (videos, videos)
        split, findings = spans.examine_split(name)
        assert len(split.texts) == sentences
        assert all(0 <= v.span[0] < v.span[1] for v in split.videos)
        assert (findings.problems, len(findings.notes)) == ([], 4 if name == "train" else 0)
