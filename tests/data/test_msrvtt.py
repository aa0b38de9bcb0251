import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.records import AnnotationError
from tvr_lightning.errors import MissingAssetError

SENTENCES = [
    ("video7010", "a clip showing a computer screen"),
    ("video9770", "a man gives a speech"),
    ("video7010", "a person  explains\ta program "),
    ("video9771", "a girl does gymnastics"),
]
LIST = "video_id\nvideo7010\n"


def write_excerpt(root: Path, sentences: list[tuple[str, str]] = SENTENCES, train: str = LIST) -> Path:
    folder = root / "msrvtt"
    (folder / "videos").mkdir(parents=True)
    ids = ["video7010", "video9770", "video9771"]
    data = {
        "info": {},
        "videos": [{"video_id": name, "category": 9, "split": "train", "id": i} for i, name in enumerate(ids)],
        "sentences": [{"caption": text, "video_id": name, "sen_id": i} for i, (name, text) in enumerate(sentences)],
    }
    (folder / "MSRVTT_data.json").write_text(json.dumps(data))
    (folder / "MSRVTT_train.9k.csv").write_text(train)
    (folder / "MSRVTT_JSFUSION_test.csv").write_text(
        "key,vid_key,video_id,sentence\n"
        "ret0,msr9770,video9770,a person is connecting something to system\n"
        'ret1,msr9771,video9771,"a little girl, who does gymnastics"\n'
    )
    for name in ids:
        (folder / "videos" / f"{name}.mp4").touch()
    return folder


def test_training_captions_come_from_the_json_and_test_pairs_from_their_own_file(tmp_path):
    write_excerpt(tmp_path)
    data = MSRVTT(root=str(tmp_path))
    train, test = data.read_split("train"), data.read_split("test")
    assert [(train.videos[t.video].video_id, t.text) for t in train.texts] == [
        ("video7010", "a clip showing a computer screen"),
        ("video7010", "a person explains a program"),
    ]
    assert [(test.videos[t.video].video_id, t.text) for t in test.texts] == [
        ("video9770", "a person is connecting something to system"),
        ("video9771", "a little girl, who does gymnastics"),
    ]
    assert test.videos[1].path == tmp_path / "msrvtt" / "videos" / "video9771.mp4"
    assert data.validation == "test"
    assert data.read_split("val") is test
    assert "1k-A" in data.ground_truth("test").protocol


def test_line_endings_and_byte_order_marks_change_nothing(tmp_path):
    plain = write_excerpt(tmp_path / "plain")
    windows = write_excerpt(tmp_path / "windows")
    for file in [*plain.glob("*.csv"), *plain.glob("*.json")]:
        text = file.read_text().replace("\n", "\r\n")
        (windows / file.name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    for name in ("train", "test"):
        expected = MSRVTT(root=str(tmp_path / "plain")).read_split(name)
        found = MSRVTT(root=str(tmp_path / "windows")).read_split(name)
        assert found.texts == expected.texts
        assert [v.video_id for v in found.videos] == [v.video_id for v in expected.videos]


@pytest.mark.parametrize(
    ("sentences", "train", "kind", "named"),
    [
        ([*SENTENCES, ("video1", "a dog")], LIST, "caption-without-video", ["sentences[4]", "video1"]),
        ([*SENTENCES, ("video7010", "  ")], LIST, "empty-caption", ["video7010, caption 2"]),
        (SENTENCES[1:2], LIST, "video-without-caption", ["video7010", "MSRVTT_train.9k.csv"]),
        (SENTENCES, "video_id\nvideo7010\nvideo7010\n", "duplicate-id", ["video7010", "occurs 2 times"]),
        (SENTENCES, "id\nvideo7010\n", "malformed", ["header", "'video_id' is missing"]),
        (SENTENCES, "video_id\n", "malformed", ["MSRVTT_train.9k.csv", "lists no videos"]),
    ],
)
def test_contradictions_are_errors_that_name_file_entry_and_fix(tmp_path, sentences, train, kind, named):
    write_excerpt(tmp_path, sentences, train)
    with pytest.raises(AnnotationError) as caught:
        MSRVTT(root=str(tmp_path)).read_split("train")
    assert [problem.kind for problem in caught.value.problems] == [kind]
    for word in [*named, caught.value.problems[0].file, caught.value.problems[0].fix]:
        assert word in str(caught.value)


def test_malformed_files_are_errors_that_name_the_place(tmp_path):
    folder = write_excerpt(tmp_path)
    (folder / "MSRVTT_data.json").write_text('{"videos": [\n}')
    with pytest.raises(AnnotationError, match=r"MSRVTT_data\.json: line 2 column 1: not JSON"):
        MSRVTT(root=str(tmp_path)).read_split("train")
    (folder / "MSRVTT_data.json").write_text('{"videos": [{"video_id": 3}], "sentences": []}')
    with pytest.raises(AnnotationError, match=r"videos\[0\], video_id: expected str, found int"):
        MSRVTT(root=str(tmp_path)).read_split("train")
    (folder / "MSRVTT_data.json").write_bytes(b'{"videos": "\xff"}')
    with pytest.raises(AnnotationError, match="byte 12: not UTF-8"):
        MSRVTT(root=str(tmp_path)).read_split("train")
    (folder / "MSRVTT_JSFUSION_test.csv").write_text("video_id,sentence\nvideo1,a,b\n")
    with pytest.raises(AnnotationError, match="row 2: 3 fields, but the header has 2"):
        MSRVTT(root=str(tmp_path)).read_split("test")


def test_every_problem_is_reported_each_time_the_split_is_read(tmp_path):
    write_excerpt(tmp_path, [*SENTENCES, ("video1", "a dog"), ("video7010", "")])
    data = MSRVTT(root=str(tmp_path))
    first, again = data.examine_split("train")[1].problems, data.examine_split("train")[1].problems
    assert {problem.kind for problem in first} == {"caption-without-video", "empty-caption"}
    assert again == first


def test_missing_annotations_say_what_where_and_the_layout(tmp_path):
    folder = write_excerpt(tmp_path)
    (folder / "MSRVTT_train.9k.csv").unlink()
    with pytest.raises(MissingAssetError) as caught:
        MSRVTT(root=str(tmp_path)).setup("fit")
    assert str(folder / "MSRVTT_train.9k.csv") in str(caught.value)
    assert "videos/video0.mp4" in str(caught.value)
    MSRVTT(root=str(tmp_path)).check_present("test")
    with pytest.raises(MissingAssetError) as caught:
        MSRVTT(root=str(tmp_path), split="7k").check_present()
    absent = [line for line in str(caught.value).splitlines() if "looked for" in line]
    assert absent == [f"  - MSRVTT_train.7k.csv: looked for {folder / 'MSRVTT_train.7k.csv'}"]


def test_real_splits_have_the_published_sizes(test_data):
    root = str(test_data / "annotations")
    for split, sizes in {"9k": (9000, 180_000), "7k": (7010, 140_200), "full": (6513, 130_260)}.items():
        data = MSRVTT(root=root, split=split)
        train = data.read_split("train")
        assert (len(train.videos), len(train.texts)) == sizes
        test = data.read_split("test")
        if split == "full":
            assert len(data.read_split("val").videos) == 497
            assert (len(test.videos), len(test.texts)) == (2990, 59_800)
        else:
            assert (len(test.videos), len(test.texts)) == (1000, 1000)
            assert not {v.video_id for v in train.videos} & {v.video_id for v in test.videos}


def test_real_test_sentences_stand_as_in_their_own_file(test_data, tmp_path):
    root = test_data / "annotations"
    data = MSRVTT(root=str(root))
    test = data.read_split("test")
    captions, problems = data._captions
    assert not problems
    different = sum(t.text not in captions[test.videos[t.video].video_id] for t in test.texts)
    assert 0 < different <= 35  # fewer than 35 would differ by more than white space
    assert sum(count > 1 for count in Counter(t.text for t in test.texts).values()) >= 4
    shutil.copytree(root / "crlf" / "msrvtt", tmp_path / "msrvtt")
    assert MSRVTT(root=str(tmp_path)).read_split("test").texts == test.texts


def test_real_clips_load_with_their_captions(test_data):
    root = str(test_data / "annotations")
    with pytest.raises(MissingAssetError, match="995 of the 1000 video files of the test split"):
        MSRVTT(root=root).setup("test")
    data = MSRVTT(root=root, on_corrupt="skip", frames=4, image_size=32, batch_size=10, num_workers=0)
    data.setup()
    assert len(data.load_split("train").videos) == 10
    batch = next(iter(data.train_dataloader()))
    assert batch.video.video.pixels.float().std() > 10
    videos = list(data.test_dataloader()[1])
    found = {name: int(i) for b in videos for name, i in zip(b.video_id, b.index, strict=True)}
    assert set(found) == {"video7021", "video7500", "video9731", "video9770", "video9771"}
    split = data.read_split("test")
    assert split.texts[found["video9771"]].text == "a little girl does gymnastics"
