"""Videos of one's own: they are read from any table, checked, trained on and tested like the datasets."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tvr_lightning.data import VideoFolder
from tvr_lightning.data.check import check
from tvr_lightning.data.records import AnnotationError
from tvr_lightning.errors import MissingAssetError

RECIPES = Path(__file__).parents[2] / "recipes"
CAPTIONS = {f"video{i}.mp4": [f"caption {i}", "another"] if i == 0 else [f"caption {i}"] for i in range(20)}
ROWS = [
    {"video": video, "caption": caption, "split": "test" if i < 4 else "train"}
    for i, (video, said) in enumerate(CAPTIONS.items())
    for caption in said
]


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    frame = pd.DataFrame(rows)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory, synthetic) -> Path:
    """A folder with the videos of a few synthetic clips and a table, two captions for the first."""
    root = tmp_path_factory.mktemp("own")
    (root / "videos").symlink_to(synthetic("msrvtt", 20) / "msrvtt" / "videos")
    write_table(root / "captions.csv", ROWS)
    return root


def data(root: Path, **options) -> VideoFolder:
    return VideoFolder(root=str(root), frames=2, num_workers=0, batch_size=4, **options)


def test_splits_follow_the_table_and_nothing_is_wrong(root, tmp_path):
    test, train = data(root).read_split("test"), data(root).read_split("train")
    assert [video.video_id for video in test.videos] == [f"video{i}.mp4" for i in range(4)]
    assert [text.text for text in test.texts] == ["caption 0", "another", "caption 1", "caption 2", "caption 3"]
    assert len(train.videos) == len(train.texts) == 16
    assert data(root).validation == "test"
    assert check(data(root), progress=False).problems == []
    rows = [{**row, "split": "validation" if i < 6 else row["split"]} for i, row in enumerate(ROWS[5:] + ROWS[:5])]
    write_table(tmp_path / "captions.csv", rows)
    assert data(tmp_path).validation == "official"
    assert len(data(tmp_path).read_split("val").videos) == 6


@pytest.mark.parametrize(
    ("suffix", "form"),
    [("csv", "one row per caption"), ("csv", "numbered columns"), ("jsonl", "one row per caption"),
     ("jsonl", "one row per video"), ("jsonl", "numbered columns"), ("parquet", "one row per caption"),
     ("parquet", "one row per video"), ("parquet", "numbered columns")],
)  # fmt: skip
def test_every_table_says_the_same(root, tmp_path, suffix, form):
    rows = ROWS
    if form == "one row per video":
        rows = [{"path": f"videos/{video}", "captions": said} for video, said in CAPTIONS.items()]
    elif form == "numbered columns":
        rows = [{"video": v, "caption_1": said[0], "caption_2": "".join(said[1:])} for v, said in CAPTIONS.items()]
    if form != "one row per caption":
        rows = [{"split": "test" if i < 4 else "train", **row} for i, row in enumerate(rows)]
    write_table(tmp_path / f"captions.{suffix}", rows)
    (tmp_path / "videos").symlink_to(root / "videos")
    for split in ("train", "test"):
        found, expected = data(tmp_path).load_split(split), data(root).load_split(split)
        assert found.texts == expected.texts
        assert [video.path.resolve() for video in found.videos] == [video.path.resolve() for video in expected.videos]


@pytest.mark.parametrize("other", ["video0", "./video0.mp4", "videos/video0.mp4", "video0.MP4", "x/../video0"])
def test_every_spelling_of_a_file_is_the_same_video(root, tmp_path, other):
    (tmp_path / "videos").symlink_to(root / "videos")
    for splits in (("train", "test"), ("test", "train")):
        rows = [{**ROWS[0], "split": splits[0]}, {**ROWS[1], "video": other, "split": splits[1]}, *ROWS[2:]]
        write_table(tmp_path / "captions.csv", rows)
        said = rf"{splits[0]} \(row 2, .*{splits[1]} \(row 3, {other}\); write one split"
        with pytest.raises(AnnotationError, match=said):
            data(tmp_path).setup("fit")
    write_table(tmp_path / "captions.csv", [ROWS[0], {**ROWS[1], "video": other}, *ROWS[2:]])
    assert len(data(tmp_path).read_split("test").videos) == 4
    write_table(
        tmp_path / "captions.csv", [{"video": row["video"], "caption": "x"} for row in [*ROWS, {"video": other}]]
    )
    assert sum(len(data(tmp_path).read_split(split).videos) for split in ("train", "test")) == 20


def test_without_splits_the_same_videos_are_drawn_in_whatever_order(root, tmp_path):
    rows = [{"video": row["video"], "caption": row["caption"]} for row in ROWS]
    drawn = []
    for place, table in enumerate((rows, rows[::-1])):
        write_table(tmp_path / f"{place}.csv", table)
        one = data(tmp_path, table=f"{place}.csv", test_share=0.25, seed=place)
        drawn.append({video.video_id for video in one.read_split("test").videos})
        assert len(one.read_split("train").videos) == 15
        assert not drawn[-1] & {video.video_id for video in one.read_split("train").videos}
        assert "5 of 20 videos sampled" in one.read_split("test").protocol
    assert len(drawn[0]) == 5
    assert drawn[0] == drawn[1]


def test_what_is_wrong_is_said_in_one_sentence(root, tmp_path):
    wrong = {
        "split,video,caption\ntrain,a.mp4, \n": r"captions\.csv: a\.mp4, caption 0: the caption is empty",
        "split,video\ntrain,a.mp4\n": r"no column contains captions, found \['split', 'video'\]; name it one of capt",
        "split,caption\ntrain,a dog\n": r"no column contains the video, found .*; name it one of file_name, file,",
        "split,video,caption\nlearn,a.mp4,a dog\n": r"row 2, a\.mp4: no split 'learn'; write one of train, val,",
        "split,video,caption\ntrain,a.mp4,x\ntest,a.mp4,y\n": r"a\.mp4: its rows are in train \(row 2, .*; write one",
        "split,video,caption\ntest,a.mp4,x\n": r"column split: no video is in the split 'train'; assign some rows",
        "split,video,caption\ntrain,../../a.mp4,x\n": r"the name leads out of the folder",
        "title,text\nvideos/video0.mp4,a dog\n": r"metadata\.csv: columns: no column contains the video, found .*title",
        "file_name,title\nvideos/video0.mp4,a dog\n": r"metadata\.csv: columns: no column contains captions, found .*f",
    }
    (tmp_path / "videos").symlink_to(root / "videos")
    for text, sentence in wrong.items():
        table = tmp_path / ("metadata.csv" if sentence.startswith("metadata") else "captions.csv")
        table.write_text(text)
        with pytest.raises(AnnotationError, match=sentence):
            data(tmp_path).read_split("train")
        table.unlink()
    for name in ("metadata", "captions"):
        for suffix in ("csv", "jsonl"):
            (tmp_path / f"{name}.{suffix}").write_text("{}\n")
        said = rf"contains {name}\.csv, {name}\.jsonl\. Choose one with data\.init_args\.table"
        with pytest.raises(MissingAssetError, match=said):
            data(tmp_path).read_split("train")
    with pytest.raises(ValueError, match="test_share is 1; it must be"):
        data(tmp_path, test_share=1)


@pytest.mark.parametrize("folder", ["", "videos"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_hugging_face_s_layout_is_read_without_an_option(root, tmp_path, suffix, folder):
    """The table is in the folder of the videos, and `file_name` is relative to it."""
    videos = tmp_path / folder
    (videos / "deep").mkdir(parents=True)
    for i, video in enumerate(CAPTIONS):
        (videos / ("deep" if i % 2 else "") / video).symlink_to(root / "videos" / video)
    rows = [
        {"file_name": f"deep/{video}" if i % 2 else video, "text": said[0], "video_id": f"id {i}"}
        for i, (video, said) in enumerate(CAPTIONS.items())
    ]
    table = videos / f"metadata.{suffix}"
    write_table(table, rows)
    splits = [data(tmp_path).load_split(split) for split in ("train", "test")]
    found = {
        video.video_id: text.text for split in splits for text in split.texts for video in [split.videos[text.video]]
    }
    assert found == {row["file_name"]: row["text"] for row in rows}
    assert all(video.path == videos / video.video_id for split in splits for video in split.videos)
    assert check(data(tmp_path), progress=False).problems == []
    write_table(tmp_path / "captions.csv", [{"video": row["file_name"], "caption": "ours"} for row in rows])
    assert {text.text for text in data(tmp_path).read_split("test").texts} == {"ours"}
    again = data(tmp_path, table=table.relative_to(tmp_path).as_posix())
    assert again.read_split("test").texts == splits[1].texts


def test_captions_without_a_video_stop_a_run_and_videos_without_captions_are_noted(root, tmp_path):
    write_table(tmp_path / "captions.csv", [row for row in ROWS if row["video"] != "video7.mp4"])
    (tmp_path / "videos").mkdir()
    for file in (root / "videos").iterdir():
        if file.name != "video9.mp4":
            (tmp_path / "videos" / file.name).symlink_to(file)
    with pytest.raises(MissingAssetError, match=r"1 of the 15 video files of the train split: .* \S+video9\.mp4"):
        data(tmp_path).setup("fit")
    (note,) = check(data(tmp_path), progress=False).notes
    assert "video7.mp4; left out" in str(note)
