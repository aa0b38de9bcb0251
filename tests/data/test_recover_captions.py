"""Files of recovered captions, and the training pairs that contain them."""

import re

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.recover_captions import Description, find_captions, read_captions, write_captions
from tvr_lightning.errors import MissingAssetError, UserError

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
    ("table", "message"),
    [
        ({"video_id": ["v"], "caption": ["a"]}, "row 0: the key 'segment' is missing, found ['caption', 'video_id']"),
        ({"video_id": ["v", "v"], "segment": [1, 1], "caption": ["a", "b"]}, "segment 1 of v is described more than"),
        ({"video_id": ["v"], "segment": [0], "caption": [None]}, "row 0, column caption: expected str, found NoneType"),
        ({"video_id": ["v"], "segment": ["x"], "caption": ["a"]}, "row 0, column segment: 'x' is not a whole number"),
        ({"video_id": ["v"], "segment": [0], "caption": [" "]}, "contains no descriptions"),
        ("no table", "not a parquet file"),
    ],
)
def test_bad_tables_are_refused(tmp_path, table, message):
    path = tmp_path / "captions.parquet"
    if isinstance(table, str):
        path.write_text(table)
    else:
        pq.write_table(pa.table(table), path)
    with pytest.raises(UserError, match=re.escape(f"{path}: ")) as raised:
        read_captions(path)
    assert message in str(raised.value)


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
