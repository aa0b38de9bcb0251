"""Your own videos: captions from any table, checked and split like a dataset."""

from pathlib import Path

import pandas as pd
import pytest

from tvr_lightning.data import VideoFolder
from tvr_lightning.data.check import check
from tvr_lightning.data.records import AnnotationError
from tvr_lightning.errors import MissingAssetError

CAPTIONS = {f"video{i}.mp4": [f"caption {i}", "another"] if i == 0 else [f"caption {i}"] for i in range(20)}
ROWS = [
    {"video": video, "caption": caption, "split": "test" if i < 4 else "train"}
    for i, (video, said) in enumerate(CAPTIONS.items())
    for caption in said
]


def write_table(path: Path, rows: list[dict]) -> None:
    frame = pd.DataFrame(rows)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory, synthetic):
    """A folder with synthetic clips and a table of captions, two for the first clip."""
    root = tmp_path_factory.mktemp("own")
    (root / "videos").symlink_to(synthetic("msrvtt", 20) / "msrvtt" / "videos")
    write_table(root / "captions.csv", ROWS)
    return root


@pytest.fixture
def copy(root, tmp_path):
    """A folder with the same clips, without a table."""
    (tmp_path / "videos").symlink_to(root / "videos")
    return tmp_path


def data(root: Path, **options) -> VideoFolder:
    return VideoFolder(root=str(root), frames=2, num_workers=0, batch_size=4, **options)


def test_splits_follow_the_table(root, tmp_path):
    test, train = data(root).read_split("test"), data(root).read_split("train")
    assert [video.video_id for video in test.videos] == [f"video{i}.mp4" for i in range(4)]
    assert [text.text for text in test.texts] == ["caption 0", "another", "caption 1", "caption 2", "caption 3"]
    assert len(train.videos) == len(train.texts) == 16
    assert data(root).validation == "test"
    rows = [{**row, "split": "validation" if i < 6 else row["split"]} for i, row in enumerate(ROWS[5:] + ROWS[:5])]
    write_table(tmp_path / "captions.csv", rows)
    assert data(tmp_path).validation == "official"
    assert len(data(tmp_path).read_split("val").videos) == 6


def test_all_captions_of_held_out_videos_are_queries(copy):
    write_table(copy / "captions.csv", [{**row, "caption": row["caption"] + end} for row in ROWS[1:] for end in "ab"])
    held_out = data(copy, holdout=4).read_split("val")
    assert (len(held_out.videos), len(held_out.texts)) == (4, 8)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_every_form_of_table_gives_the_same_splits(root, copy, suffix):
    split = {video: "test" if i < 4 else "train" for i, video in enumerate(CAPTIONS)}
    forms = [
        ROWS,
        [{"video": v, "caption_1": c[0], "caption_2": "".join(c[1:]), "split": split[v]} for v, c in CAPTIONS.items()],
    ]
    if suffix != "csv":  # which has no lists
        forms.append([{"path": f"videos/{v}", "captions": c, "split": split[v]} for v, c in CAPTIONS.items()])
    for rows in forms:
        write_table(copy / f"captions.{suffix}", rows)
        for name in ("train", "test"):
            found, expected = data(copy).load_split(name), data(root).load_split(name)
            assert found.texts == expected.texts
            assert [v.path.resolve() for v in found.videos] == [v.path.resolve() for v in expected.videos]


@pytest.mark.parametrize("other", ["video0", "./video0.mp4", "videos/video0.mp4", "video0.MP4", "x/../video0"])
def test_every_spelling_of_a_file_name_is_the_same_video(copy, other):
    for splits in (("train", "test"), ("test", "train")):
        rows = [{**ROWS[0], "split": splits[0]}, {**ROWS[1], "video": other, "split": splits[1]}, *ROWS[2:]]
        write_table(copy / "captions.csv", rows)
        message = rf"{splits[0]} \(row 2, .*{splits[1]} \(row 3, {other}\); write one split"
        with pytest.raises(AnnotationError, match=message):
            data(copy).setup("fit")
    write_table(copy / "captions.csv", [ROWS[0], {**ROWS[1], "video": other}, *ROWS[2:]])
    assert len(data(copy).read_split("test").videos) == 4
    write_table(copy / "captions.csv", [{"video": row["video"], "caption": "x"} for row in [*ROWS, {"video": other}]])
    assert sum(len(data(copy).read_split(split).videos) for split in ("train", "test")) == 20


def test_a_table_without_splits_is_split_regardless_of_the_order_of_rows(copy):
    rows = [{"video": row["video"], "caption": row["caption"]} for row in ROWS]
    drawn = []
    for seed, table in enumerate((rows, rows[::-1])):
        write_table(copy / f"{seed}.csv", table)
        one = data(copy, table=f"{seed}.csv", test_share=0.25, seed=seed)
        train, test = one.read_split("train"), one.read_split("test")
        drawn.append({video.video_id for video in test.videos})
        assert (len(train.videos), len(test.videos)) == (15, 5)
        assert not drawn[-1] & {video.video_id for video in train.videos}
        assert "5 of 20 videos sampled" in test.protocol
    assert drawn[0] == drawn[1]


def test_bad_tables_are_refused(copy):
    tables = {
        "split,video,caption\ntrain,a.mp4, \n": r"captions\.csv: a\.mp4, caption 0: the caption is empty",
        "split,video\ntrain,a.mp4\n": r"no column contains captions, found \['split', 'video'\]; name it one of capt",
        "split,caption\ntrain,a dog\n": r"no column contains the video, found .*; name it one of file_name, file,",
        "split,video,caption\nlearn,a.mp4,a dog\n": r"row 2, a\.mp4: no split 'learn'; write one of train, val,",
        "split,video,caption\ntest,a.mp4,x\n": r"column split: no video is in the split 'train'; assign some rows",
        "split,video,caption\ntrain,../../a.mp4,x\n": r"the name leads out of the folder",
        "split,video,caption\ntrain,/home/a.mp4,x\n": r"row 2, /home/a\.mp4: the path is absolute; keep the videos in",
        "title,text\nvideo0.mp4,a dog\n": r"metadata\.csv: columns: no column contains the video, found .*title",
    }
    for text, message in tables.items():
        table = copy / ("metadata.csv" if message.startswith("metadata") else "captions.csv")
        table.write_text(text)
        with pytest.raises(AnnotationError, match=message):
            data(copy).read_split("train")
        table.unlink()
    for name in ("captions.csv", "captions.jsonl"):
        (copy / name).write_text("{}\n")
    with pytest.raises(MissingAssetError, match=r"contains captions\.csv, captions\.jsonl\. Choose one with"):
        data(copy).read_split("train")


@pytest.mark.parametrize(("suffix", "folder"), [("csv", "videos"), ("jsonl", ""), ("parquet", "videos")])
def test_the_layout_of_hugging_face_needs_no_option(root, tmp_path, suffix, folder):
    """The table is in the folder of the videos, and `file_name` is relative to it."""
    videos = tmp_path / folder
    (videos / "deep").mkdir(parents=True)
    rows = []
    for i, (video, said) in enumerate(CAPTIONS.items()):
        name = f"deep/{video}" if i % 2 else video
        (videos / name).symlink_to(root / "videos" / video)
        rows.append({"file_name": name, "text": said[0], "video_id": f"id {i}"})
    table = videos / f"metadata.{suffix}"
    write_table(table, rows)
    splits = [data(tmp_path).load_split(split) for split in ("train", "test")]
    found = {split.videos[text.video].video_id: text.text for split in splits for text in split.texts}
    assert found == {row["file_name"]: row["text"] for row in rows}
    assert all(video.path == videos / video.video_id for split in splits for video in split.videos)
    write_table(tmp_path / "captions.csv", [{"video": row["file_name"], "caption": "ours"} for row in rows])
    assert {text.text for text in data(tmp_path).read_split("test").texts} == {"ours"}
    again = data(tmp_path, table=table.relative_to(tmp_path).as_posix())
    assert again.read_split("test").texts == splits[1].texts


def test_missing_videos_stop_a_run_and_videos_without_captions_are_noted(root, tmp_path):
    write_table(tmp_path / "captions.csv", [row for row in ROWS if row["video"] != "video7.mp4"])
    (tmp_path / "videos").mkdir()
    for file in (root / "videos").iterdir():
        if file.name != "video9.mp4":
            (tmp_path / "videos" / file.name).symlink_to(file)
    with pytest.raises(MissingAssetError, match=r"1 of the 15 video files of the train split: .* \S+video9\.mp4"):
        data(tmp_path).setup("fit")
    report = check(data(tmp_path), progress=False)
    assert [problem.entry for problem in report.problems] == ["video9.mp4"]
    (note,) = report.notes
    assert "video7.mp4; left out" in str(note)
