"""Files of recovered captions, and the training pairs that contain them."""

import re

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.recover_captions import Description, find_captions, read_captions, write_captions
from tvr_lightning.errors import MissingAssetError, UserError

HEAD = "video_id,segment,caption\n"
SMALL = {"frames": 2, "image_size": 32, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}


def rows(*entries):
    return [Description(video, segment, segment, segment + 1.0, text, "person") for video, segment, text in entries]


def test_descriptions_are_sorted_by_time(tmp_path):
    path, again = tmp_path / "captions.parquet", tmp_path / "again.parquet"
    for out in (path, again):
        write_captions(out, rows(("b", 1, "two"), ("a", 0, " one "), ("b", 0, "first"), ("b", 2, "")))
    captions = read_captions(path)
    assert captions.descriptions == {"a": ["one"], "b": ["first", "two"]}
    assert captions.empty == 1
    assert again.read_bytes() == path.read_bytes()
    pd.DataFrame({"caption": ["a dog"], "video_id": ["v"], "segment": [0], "mood": [1.5]}).to_parquet(path)
    assert read_captions(path).descriptions["v"] == ["a dog"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'note,video_id,segment,caption\n,clip0,1,"then, it ""barks"""\n,clip0,0,a dog\n,clip1,0,\n'),
        ("a.CSV", '\ufeffvideo_id,segment,caption\r\nclip0,0,a dog\r\nclip0,1,"then, it ""barks"""\r\n'),
        (
            "a.jsonl",
            '\ufeff{"video_id": "clip0", "segment": 1, "caption": "then, it \\"barks\\""}\n\n'
            '{"video_id": "clip0", "segment": 0, "caption": "a dog", "by": "me"}\n',
        ),
    ],
)
def test_captions_may_be_csv_or_json_lines(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    assert read_captions(tmp_path / name).descriptions["clip0"] == ["a dog", 'then, it "barks"']


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", {"video_id": ["v"], "caption": ["a"]},
         "row 0: the key 'segment' is missing, found ['caption', 'video_id']"),
        ("a.parquet", {"video_id": ["v", "v"], "segment": [1, 1], "caption": ["a", "b"]},
         "segment 1 of v is described more than"),
        ("a.parquet", {"video_id": ["v"], "segment": [0], "caption": [None]},
         "row 0, column caption: expected str, found NoneType"),
        ("a.parquet", {"video_id": ["v"], "segment": ["x"], "caption": ["a"]},
         "row 0, column segment: 'x' is not a whole number"),
        ("a.parquet", {"video_id": ["v"], "segment": [0], "caption": [" "]}, "contains no descriptions"),
        ("a.parquet", "no table", "not a parquet file"),
        ("a.csv", HEAD + "clip0,0,a dog\nclip1,first,a cat\n", "row 3, column segment: 'first' is not a whole"),
        ("a.csv", HEAD + ",0,a dog\n", "row 2, column video_id: there is no value"),
        ("a.csv", HEAD + "clip0,0,\udcff\n", "not UTF-8 text"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0, "caption": "a"}\n{"video_id"\n', "line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: expected dict, found list"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0.5, "caption": "a"}\n', "line 1, column segment: 0.5"),
    ],
)  # fmt: skip
def test_errors_in_captions_name_the_file_row_and_column(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, str):
        path.write_bytes(content.encode(errors="surrogateescape"))
    else:
        pq.write_table(pa.table(content), path)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        read_captions(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_a_file_is_found_by_its_path_or_in_the_dataset(tmp_path, monkeypatch):
    folder, here = tmp_path / "msrvtt", tmp_path / "here"
    for path in (folder, here):
        path.mkdir()
    monkeypatch.chdir(here)
    (folder / "captions.parquet").touch()
    assert find_captions("captions.parquet", folder) == folder / "captions.parquet"
    (here / "captions.parquet").touch()
    assert find_captions("captions.parquet", folder).resolve() == here / "captions.parquet"
    with pytest.raises(MissingAssetError, match="tvr caption"):
        read_captions(tmp_path / "none.parquet")
    with pytest.raises(MissingAssetError, match=re.escape(f"looked for other.parquet and {folder / 'other.parquet'}")):
        find_captions("other.parquet", folder)


def test_training_pairs_contain_the_descriptions_of_their_video(msrvtt):
    data = MSRVTT(root=str(msrvtt), extra_captions="captions.parquet", **SMALL)
    data.setup("fit")
    captions = read_captions(msrvtt / "msrvtt" / "captions.parquet")
    for batch in data.train_dataloader():
        assert batch.extras["recover_captions"] == [captions.descriptions[name] for name in batch.video.video_id]
    plain = MSRVTT(root=str(msrvtt), **SMALL)
    assert next(iter(plain.train_dataloader())).extras == {}
    data = MSRVTT(root=str(msrvtt), extra_captions="nowhere.parquet", **SMALL)
    data.setup("test")  # neither reads nor needs the file
    for loader in data.test_dataloader():
        assert not hasattr(next(iter(loader)), "extras")
    with pytest.raises(MissingAssetError, match=r"no captions file nowhere\.parquet"):
        data.setup("fit")


def test_training_videos_without_a_description_are_named(msrvtt, tmp_path):
    data = MSRVTT(root=str(msrvtt), **SMALL)
    ids = [video.video_id for video in data.read_split("train").videos]
    described = tmp_path / "captions.parquet"
    for entries, message in (
        ([*((video_id, 0, "x") for video_id in ids[2:]), (ids[0], 0, "")], "2 of .*1 of its captions are empty"),
        ([("elsewhere", 0, "x")], rf"{len(ids)} of the {len(ids)} training .* It describes elsewhere and others"),
    ):
        write_captions(described, rows(*entries))
        data = MSRVTT(root=str(msrvtt), extra_captions=str(described), **SMALL)
        data.setup("fit")
        with pytest.raises(UserError, match=message):
            data.train_dataloader()
