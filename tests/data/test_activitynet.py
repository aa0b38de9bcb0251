import json
from pathlib import Path
from typing import Any

import pytest

from tvr_lightning.data.activitynet import ActivityNet
from tvr_lightning.data.records import AnnotationError

ANNOTATIONS = {
    "v_a-1": {"duration": 9.0, "timestamps": [[0, 3], [3, 9]], "sentences": ["A man runs.", " He\nstops."]},
    "v__b2": {"duration": 5.0, "timestamps": [[0, 5]], "sentences": ["\nA dog barks."]},
}


def write_excerpt(root: Path, annotations: Any = ANNOTATIONS, ids: Any = ("v__b2", "v_none", "v_a-1")) -> Path:
    folder = root / "activitynet"
    (folder / "videos").mkdir(parents=True)
    (folder / "val_1.json").write_text(json.dumps(annotations))
    (folder / "val_ids.json").write_text(json.dumps(ids))
    return folder


def test_sentences_become_one_paragraph_and_ids_without_sentences_are_noted(tmp_path):
    folder = write_excerpt(tmp_path)
    data = ActivityNet(root=str(tmp_path))
    split, findings = data.examine_split("test")
    assert [(split.videos[t.video].video_id, t.text) for t in split.texts] == [
        ("v__b2", "A dog barks."),
        ("v_a-1", "A man runs. He stops."),
    ]
    assert split.videos[1].path == folder / "videos" / "v_a-1.mp4"
    assert findings.problems == []
    assert [note.entry for note in findings.notes] == ["v_none"]
    assert "val1" in split.protocol
    assert data.validation == "test"


def test_videos_end_at_the_annotated_duration_on_request(tmp_path):
    annotations = {**ANNOTATIONS, "v_a-1": {**ANNOTATIONS["v_a-1"], "duration": 8.2}, "v_c": {"sentences": ["A cat."]}}
    write_excerpt(tmp_path, annotations, ids=["v_a-1", "v__b2", "v_c"])
    spans = {end: ActivityNet(root=str(tmp_path), annotated_end=end).read_split("test").videos for end in (True, False)}
    assert [video.span for video in spans[True]] == [(0.0, 9.0), (0.0, 5.0), None]
    assert [video.span for video in spans[False]] == [None] * 3
    annotations["v_c"]["duration"] = "long"
    (tmp_path / "activitynet" / "val_1.json").write_text(json.dumps(annotations))
    with pytest.raises(AnnotationError, match="v_c, duration: 'long' is not a length in seconds"):
        ActivityNet(root=str(tmp_path), annotated_end=True).read_split("test")


@pytest.mark.parametrize(
    ("annotations", "ids", "kind", "named"),
    [
        (ANNOTATIONS, ["v_a-1"], "caption-without-video", "v__b2: val_ids.json does not list it"),
        ({**ANNOTATIONS, "v_a-1": {"sentences": []}}, ["v__b2", "v_a-1"], "video-without-caption", "v_a-1"),
        ({**ANNOTATIONS, "v_a-1": {"sentences": ["x", " "]}}, ["v__b2", "v_a-1"], "empty-caption", "v_a-1, caption 1"),
        (ANNOTATIONS, ["v__b2", "v_a-1", "v_a-1"], "duplicate-id", "val_ids.json: v_a-1"),
        ({"v_a-1": {}}, ["v_a-1"], "malformed", "the key 'sentences' is missing"),
        ({"v_a-1": {"sentences": [3]}}, ["v_a-1"], "malformed", "expected str, found int"),
        ([], ["v_a-1"], "malformed", "expected dict, found list"),
    ],
)
def test_contradictions_are_errors_that_name_file_and_entry(tmp_path, annotations, ids, kind, named):
    write_excerpt(tmp_path, annotations, ids)
    with pytest.raises(AnnotationError) as caught:
        ActivityNet(root=str(tmp_path)).read_split("test")
    assert [problem.kind for problem in caught.value.problems] == [kind]
    assert named in str(caught.value)


def test_a_key_that_comes_twice_is_not_lost_silently(tmp_path):
    folder = write_excerpt(tmp_path)
    (folder / "val_1.json").write_text('{"v_a": {"sentences": ["x"]}, "v_a": {"sentences": ["y"]}}')
    with pytest.raises(AnnotationError, match=r"val_1\.json: v_a: the key occurs 2 times"):
        ActivityNet(root=str(tmp_path)).read_split("test")


def test_real_splits_have_the_published_sizes(test_data):
    data = ActivityNet(root=str(test_data / "annotations"))
    for name, size, left_out in (("train", 10_009, 15), ("test", 4917, 9)):
        split, findings = data.examine_split(name)
        assert (len(split.videos), len(split.texts)) == (size, size)
        assert (findings.problems, len(findings.notes)) == ([], left_out)
        assert not any("\n" in t.text or t.text.startswith(" ") for t in split.texts)
    listed = (test_data / "annotations" / "crlf" / "activitynet" / "val_1_list.txt").read_bytes().decode().split("\r\n")
    assert {v.video_id for v in split.videos} == {name for name in listed if name}
