"""MSRVTT-QA's files: what they say is what a split holds, and what is wrong with them is said."""

import json
from collections import Counter

import pytest

from tvr_lightning.data import MSRVTT, MSRVTTQA
from tvr_lightning.data.msrvtt_qa import QuestionRecord
from tvr_lightning.data.records import AnnotationError
from tvr_lightning.errors import MissingAssetError


def written(tmp_path, entries, name="test", videos=("video7",)):
    folder = tmp_path / "msrvtt"
    (folder / "videos").mkdir(parents=True, exist_ok=True)
    for video in videos:
        (folder / "videos" / f"{video}.mp4").write_bytes(b"")
    (folder / f"{name}_qa.json").write_text(json.dumps(entries), encoding="utf-8")
    return MSRVTTQA(root=str(tmp_path), num_workers=0)


def test_questions_answers_and_videos_are_those_of_the_file(tmp_path):
    entries = [
        {"id": 1, "question": "Who  runs?", "answer": "man", "category_id": 3, "video_id": 7},
        {"question": "what is it", "answer": "dog", "video_id": "video7"},
        {"question": "what is it", "answer": "cat", "video_id": "8"},
    ]
    split = written(tmp_path, entries).read_split("test")
    assert [video.video_id for video in split.videos] == ["video7", "video8"]
    assert split.texts == [
        QuestionRecord("Who runs?", 0, "man"),
        QuestionRecord("what is it", 0, "dog"),
        QuestionRecord("what is it", 1, "cat"),
    ]
    assert [question.kind for question in split.texts] == ["who", "what", "what"]


def test_a_file_without_questions_and_a_missing_one_are_errors(tmp_path):
    data = written(tmp_path, [])
    with pytest.raises(AnnotationError, match="contains no questions"):
        data.read_split("test")
    with pytest.raises(MissingAssetError, match=r"train_qa\.json: looked for"):
        data.check_present("fit")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"answer": "man", "video_id": 7}, "'question' is missing"),
        ({"question": "who", "video_id": 7}, "'answer' is missing"),
        ({"question": "who", "answer": "man"}, "the key 'video_id' is None"),
        ({"question": "who", "answer": "man", "video_id": True}, "the key 'video_id' is True"),
        ({"question": " ", "answer": "man", "video_id": 7}, "the question is empty"),
        ({"question": "who", "answer": "", "video_id": 7}, "the answer is empty"),
    ],
)
def test_a_broken_entry_is_named_with_its_file(tmp_path, entry, message):
    data = written(tmp_path, [{"question": "who", "answer": "man", "video_id": 7}, entry])
    with pytest.raises(AnnotationError, match=r"test_qa\.json") as raised:
        data.read_split("test")
    assert message in str(raised.value)
    assert "[1]" in str(raised.value)


def test_questions_about_videos_without_a_file_stop_the_run_or_are_counted(tmp_path):
    entries = [{"question": "who", "answer": "man", "video_id": number} for number in (7, 8, 9)]
    data = written(tmp_path, entries, "train")
    with pytest.raises(MissingAssetError, match="2 of the 3 video files") as raised:
        data.load_split("train")
    assert "on_corrupt" in str(raised.value)
    forgiving = MSRVTTQA(root=str(tmp_path), num_workers=0, on_corrupt="skip")
    assert [question.answer for question in forgiving.questions("train")] == ["man"]
    assert len(forgiving.load_split("train").videos) == 1


def test_fewer_training_videos_keep_questions_with_their_answers(synthetic_msrvtt):
    everything = {(q.text, q.answer) for q in MSRVTTQA(root=str(synthetic_msrvtt), num_workers=0).questions("train")}
    few = MSRVTTQA(root=str(synthetic_msrvtt), num_workers=0, max_train_videos=3)
    chosen = few.questions("train")
    assert len(few.load_split("train").videos) == 3
    assert {(q.text, q.answer) for q in chosen} <= everything
    assert Counter(q.video for q in chosen) == {0: 5, 1: 5, 2: 5}


def test_the_synthetic_questions_are_answered_by_the_scenes(synthetic_msrvtt):
    scenes = json.loads((synthetic_msrvtt / "msrvtt" / "scenes.json").read_text())["videos"]
    data = MSRVTTQA(root=str(synthetic_msrvtt), num_workers=0)
    for part in ("train", "val", "test"):
        split = data.read_split(part)
        assert {video.video_id for video in split.videos} == {i for i, v in scenes.items() if v["part"] == part}
        for question in split.texts:
            scene = scenes[split.videos[question.video].video_id]["scene"]
            first, last = scene["events"][0], scene["events"][-1]
            facts = {scene["backdrop"]["colour"], scene["backdrop"]["pattern"], first["motion"], last["motion"]}
            facts |= {event["figure"][key] for event in (first, last) for key in ("shape", "colour")}
            assert question.answer in facts
            if "background" in question.text and "color" in question.text:
                assert question.answer == scene["backdrop"]["colour"]
            if "first" in question.text and "shape" in question.text:
                assert question.answer == first["figure"]["shape"]
    known = {video.video_id: video.path for video in MSRVTT(root=str(synthetic_msrvtt)).read_split("test").videos}
    assert {video.video_id: video.path for video in split.videos} == known
    assert all(path.is_file() for path in known.values())
