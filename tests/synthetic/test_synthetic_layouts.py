"""The seven native layouts that the synthetic generator writes, read here as plainly as their formats allow."""

import csv
import json
import pickle
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pandas as pd
import pytest

from tvr_lightning.data import LSMDC, MSRVTT, MSVD, VATEX, ActivityNet, Charades, DiDeMo
from tvr_lightning.data.records import SYNTHETIC, SYNTHETIC_FILE

VIDEOS = 16


@pytest.fixture
def dataset(synthetic) -> Callable[[str], Path]:
    return lambda name: synthetic(name) / name


def scenes(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "scenes.json").read_text(encoding="utf-8"))
    assert content["dataset"] == folder.name
    return dict(content["videos"])


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def ids(folder: Path, part: str) -> list[str]:
    return [video_id for video_id, video in scenes(folder).items() if video["part"] == part]


def said(folder: Path, video_id: str) -> list[str]:
    return [caption["text"] for caption in scenes(folder)[video_id]["captions"]]


def test_results_on_a_synthetic_dataset_are_marked_and_those_on_real_data_are_not(dataset, tmp_path):
    folder = dataset("msrvtt")
    truth = MSRVTT(root=str(folder.parent)).ground_truth("test")
    assert (truth.dataset, truth.warnings) == ("synthetic MSR-VTT", [SYNTHETIC])
    (tmp_path / "msrvtt").mkdir()
    for path in folder.iterdir():
        if path.name != SYNTHETIC_FILE:
            (tmp_path / "msrvtt" / path.name).symlink_to(path)
    truth = MSRVTT(root=str(tmp_path)).ground_truth("test")
    assert (truth.dataset, truth.warnings) == ("MSR-VTT", [])


@pytest.mark.parametrize("name", ["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"])
def test_every_video_decodes_and_has_its_ground_truth(dataset, name):
    folder = dataset(name)
    videos = scenes(folder)
    assert len(videos) == VIDEOS
    assert {str(path.relative_to(folder)) for path in (folder / "videos").rglob("*") if path.is_file()} == {
        video["file"] for video in videos.values()
    }
    for number, video in enumerate(videos.values()):
        with av.open(str(folder / video["file"])) as container:
            if number % 4 == 0:  # decoding takes most of the time
                assert sum(1 for _ in container.decode(video=0)) == round(video["duration"] * video["fps"])
            assert bool(container.streams.audio) == video["scene"]["audio_track"]
        events = video["scene"]["events"]
        assert events[-1]["end"] == video["duration"]
        assert all(before["end"] == after["start"] for before, after in pairwise(events))
        assert len(video["events"]) == len(events)
        assert (video["part"] == "test") == video["scene"]["held_out"]
        for caption in video["captions"]:
            if caption["kind"].startswith("event"):
                event = events[int(caption["kind"].removeprefix("event")) - 1]
                assert caption["span"] == [event["start"], event["end"]]
        twin = video["scene"]["twin"]
        assert twin is None or videos[twin]["scene"]["events"] == events
        if name in ("vatex", "msvd") and video["part"] == "test":
            assert "sound" not in {caption["kind"] for caption in video["captions"]}, "what is asked is visible"
    descriptions = pd.read_parquet(folder / "captions.parquet")
    assert descriptions.groupby("video_id").size().to_dict() == dict.fromkeys(videos, 6)
    for _, row in descriptions.iterrows():
        video, scene = videos[row["video_id"]], videos[row["video_id"]]["scene"]
        shares = [min(event["end"], row["end"]) - max(event["start"], row["start"]) for event in scene["events"]]
        assert row["caption"].startswith(video["events"][shares.index(max(shares))])
        assert scene["backdrop"]["color"] in row["caption"]
        assert 0 <= row["start"] < row["end"] <= video["duration"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(MSRVTT, {}), (DiDeMo, {}), (LSMDC, {}), (ActivityNet, {}), (VATEX, {}), (VATEX, {"language": "zh"}),
     (VATEX, {"annotations": "official"}), (MSVD, {}), (Charades, {}), (Charades, {"split": "sta"})],
)  # fmt: skip
def test_the_native_files_contain_every_video_with_its_captions(dataset, kind, options):
    folder = dataset(kind.directory)
    data = kind(root=str(folder.parent), **options)
    everything = scenes(folder)
    for part in data.official_splits:
        split = data.read_split(part)
        found: dict[str, list[str]] = {}
        for text in split.texts:
            video = split.videos[text.video]
            name = video.path.stem if kind is Charades else video.video_id
            assert video.path == folder / everything[name]["file"]
            found.setdefault(name, []).append(text.text)
        expected = {name: said(folder, name) for name, video in everything.items() if video["part"] == part}
        for name, texts in expected.items():
            if kind in (DiDeMo, ActivityNet):
                expected[name] = [" ".join(" ".join(texts).split())]
            elif kind is Charades:
                expected[name] = texts[1:] if options else texts[:1]
            elif options.get("language"):
                expected[name] = everything[name]["chinese"]
            elif kind is MSRVTT and part == "test":
                expected[name] = [caption["text"] for caption in everything[name]["captions"] if caption["query"]]
        if kind is MSRVTT and part == "train":
            expected = {name: said(folder, name) for name, video in everything.items() if video["part"] != "test"}
        assert {name: sorted(texts) for name, texts in found.items()} == {n: sorted(t) for n, t in expected.items()}
        assert kind is MSRVTT or options.get("split") or list(found) == list(expected)


def test_msrvtt(dataset):
    folder = dataset("msrvtt")
    data = json.loads((folder / "MSRVTT_data.json").read_text())
    assert [video["video_id"] for video in data["videos"]] == [f"video{i}" for i in range(VIDEOS)]
    assert set(Counter(sentence["video_id"] for sentence in data["sentences"]).values()) == {20}

    def listed(name: str) -> set[str]:
        header, *rest = lines(folder / f"MSRVTT_{name}.csv")
        assert header == "video_id"
        assert len(set(rest)) == len(rest)
        return set(rest)

    with (folder / "MSRVTT_JSFUSION_test.csv").open(newline="") as file:
        test = list(csv.DictReader(file))
    assert list(test[0]) == ["key", "vid_key", "video_id", "sentence"]
    assert [row["video_id"] for row in test] == ids(folder, "test")
    assert listed("train.7k") == listed("train.full") | listed("val.full")
    assert listed("train.full") | listed("val.full") | listed("test.full") == {f"video{i}" for i in range(VIDEOS)}
    assert listed("test.full") > {row["video_id"] for row in test}
    for split, name in (("train", "train.full"), ("validate", "val.full"), ("test", "test.full")):
        assert {video["video_id"] for video in data["videos"] if video["split"] == split} == listed(name)


def test_didemo(dataset):
    folder = dataset("didemo")
    everything = scenes(folder)
    for part in ("train", "val", "test"):
        for moment in json.loads((folder / f"{part}_data.json").read_text()):
            assert moment["num_segments"] * 5 == everything[moment["video"]]["duration"]
            assert all(0 <= start <= end < moment["num_segments"] for start, end in moment["times"])
    assert any(name.endswith(".") for name in everything)
    assert all(name.rpartition(".")[0] == Path(video["file"]).stem for name, video in everything.items())


def test_lsmdc(dataset):
    folder = dataset("lsmdc")
    movies = []
    for part, name in {"train": "annos_training", "val": "annos_val", "test": "challenge_1000_publictect"}.items():
        rows = [line.split("\t") for line in lines(folder / f"LSMDC16_{name}.csv")]
        assert {len(row) for row in rows} == {6}
        assert all(row[0].endswith(f"_{row[1]}-{row[2]}") and row[1:3] == row[3:5] for row in rows)
        movies.append({row[0].rpartition("_")[0] for row in rows})
        assert (len(rows) > len(ids(folder, part))) == (part == "train")  # an id with two sentences
    assert not movies[0] & movies[1] | movies[1] & movies[2] | movies[0] & movies[2]


def test_activitynet(dataset):
    folder = dataset("activitynet")
    assert not ids(folder, "val")
    for name, listed in (("train", "train_ids"), ("val_1", "val_ids")):
        videos = json.loads((folder / f"{name}.json").read_text())
        assert set(json.loads((folder / f"{listed}.json").read_text())) > set(videos)
        for video_id, video in videos.items():
            assert video_id.startswith("v_")
            assert len(video["sentences"]) == len(video["timestamps"]) >= 3
            assert [sentence.startswith(" ") for sentence in video["sentences"]][:2] == [False, True]
            assert all(0 <= start < end <= video["duration"] for start, end in video["timestamps"])


def test_vatex_and_msvd(dataset):
    folder = dataset("vatex")
    for video_id, video in json.loads((folder / "vatex_data.json").read_text(encoding="utf-8")).items():
        name, start, end = video_id.rsplit("_", 2)
        assert (len(name), int(end) - int(start), len(start)) == (11, 10, 6)
        assert len(video["enCap"]) == len(video["chCap"]) == 10
    for split, parts in (("training", ["train"]), ("validation", ["val", "test"])):
        records = json.loads((folder / f"vatex_{split}_v1.0.json").read_text(encoding="utf-8"))
        assert [record["videoID"] for record in records] == [name for part in parts for name in ids(folder, part)]
    folder = dataset("msvd")
    tokens = pickle.loads((folder / "raw-captions.pkl").read_bytes())
    assert list(tokens) == list(scenes(folder))
    assert len({len(captions) for captions in tokens.values()}) > 1


def test_charades(dataset):
    folder = dataset("charades")
    assert not ids(folder, "val")
    for part in ("train", "test"):
        content = (folder / f"Charades_v1_{part}.csv").read_bytes()
        assert content.count(b"\r\n") == content.count(b"\n") == len(ids(folder, part)) + 1
        with (folder / f"Charades_v1_{part}.csv").open(newline="") as file:
            rows = {row["id"]: row for row in csv.DictReader(file)}
        assert {name: float(row["length"]) for name, row in rows.items()} == {
            name: scenes(folder)[name]["duration"] for name in ids(folder, part)
        }
        for line in lines(folder / f"charades_sta_{part}.txt"):
            video_id, start, end = line.partition("##")[0].split(" ")
            actions = [action.split(" ")[1:] for action in rows[video_id]["actions"].split(";")]
            assert [float(start), float(end)] in [[float(value) for value in action] for action in actions]
