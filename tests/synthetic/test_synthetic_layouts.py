"""The seven native layouts that the synthetic generator writes, read here as plainly as their formats allow."""

import csv
import json
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pytest

from tvr_lightning.data import MSRVTT
from tvr_lightning.data.records import SYNTHETIC, SYNTHETIC_FILE
from tvr_lightning.option_types import DatasetName
from tvr_lightning.synthetic import synthesize

VIDEOS, TEST, VAL = 10, 4, 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[[DatasetName], Path]:
    """Folder of a synthetic dataset, written at first use."""
    root = tmp_path_factory.mktemp("synthetic")
    return lambda name: synthesize(name, root, VIDEOS, 0, workers=1, progress=False)


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


def test_results_on_a_synthetic_dataset_are_marked_and_those_on_real_data_are_not(dataset):
    folder = dataset("msrvtt")
    truth = MSRVTT(root=str(folder.parent)).ground_truth("test")
    assert (truth.dataset, truth.warnings) == ("synthetic MSR-VTT", [SYNTHETIC])
    marker = (folder / SYNTHETIC_FILE).rename(folder / "aside")
    truth = MSRVTT(root=str(folder.parent)).ground_truth("test")
    marker.rename(folder / SYNTHETIC_FILE)
    assert (truth.dataset, truth.warnings) == ("MSR-VTT", [])


@pytest.mark.parametrize("name", ["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"])
def test_every_video_decodes_and_has_its_ground_truth(dataset, name):
    folder = dataset(name)
    videos = scenes(folder)
    assert len(videos) == VIDEOS
    assert {str(path.relative_to(folder)) for path in (folder / "videos").rglob("*") if path.is_file()} == {
        video["file"] for video in videos.values()
    }
    for video in videos.values():
        with av.open(str(folder / video["file"])) as container:
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


def test_msrvtt(dataset):
    folder = dataset("msrvtt")
    data = json.loads((folder / "MSRVTT_data.json").read_text())
    assert [video["video_id"] for video in data["videos"]] == [f"video{i}" for i in range(VIDEOS)]
    captions: dict[str, list[str]] = {}
    for sentence in data["sentences"]:
        captions.setdefault(sentence["video_id"], []).append(sentence["caption"])
    assert all(sorted(texts) == sorted(said(folder, video_id)) for video_id, texts in captions.items())
    assert {len(texts) for texts in captions.values()} == {20}

    def listed(name: str) -> set[str]:
        header, *rest = lines(folder / f"MSRVTT_{name}.csv")
        assert header == "video_id"
        assert len(set(rest)) == len(rest)
        return set(rest)

    with (folder / "MSRVTT_JSFUSION_test.csv").open(newline="") as file:
        test = list(csv.DictReader(file))
    assert list(test[0]) == ["key", "vid_key", "video_id", "sentence"]
    assert [row["video_id"] for row in test] == ids(folder, "test")
    for row in test:
        assert row["sentence"] in captions[row["video_id"]]
        queries = [caption["text"] for caption in scenes(folder)[row["video_id"]]["captions"] if caption["query"]]
        assert queries == [row["sentence"]]
    everything = set(captions)
    assert listed("train.9k") == everything - {row["video_id"] for row in test}
    assert listed("train.7k") == listed("train.full") | listed("val.full")
    assert listed("train.full") | listed("val.full") | listed("test.full") == everything
    assert listed("test.full") >= {row["video_id"] for row in test}
    for split, name in (("train", "train.full"), ("validate", "val.full"), ("test", "test.full")):
        assert {video["video_id"] for video in data["videos"] if video["split"] == split} == listed(name)


def test_msrvtt_full_split_tests_more_videos_than_1k_a(tmp_path):
    folder = synthesize("msrvtt", tmp_path, 20, 0, workers=1, progress=False)
    assert len(lines(folder / "MSRVTT_test.full.csv")) - 1 == 6
    assert len(lines(folder / "MSRVTT_JSFUSION_test.csv")) - 1 == 4
    assert len(lines(folder / "MSRVTT_train.9k.csv")) - 1 == 16


def test_didemo(dataset):
    folder = dataset("didemo")
    for part in ("train", "val", "test"):
        listed = lines(folder / f"{part}_list.txt")
        assert listed == ids(folder, part)
        moments = json.loads((folder / f"{part}_data.json").read_text())
        for name in listed:
            own = [moment for moment in moments if moment["video"] == name]
            assert [moment["description"] for moment in own] == said(folder, name)
            for moment in own:
                assert moment["num_segments"] * 5 == scenes(folder)[name]["duration"]
                assert all(0 <= start <= end < moment["num_segments"] for start, end in moment["times"])
    everything = scenes(folder)
    assert any(name.endswith(".") for name in everything)
    assert all(name.rpartition(".")[0] == Path(video["file"]).stem for name, video in everything.items())


def test_lsmdc(dataset):
    folder = dataset("lsmdc")
    movies = []
    files = {"train": "annos_training", "val": "annos_val", "test": "challenge_1000_publictect"}
    for part, name in files.items():
        rows = [line.split("\t") for line in lines(folder / f"LSMDC16_{name}.csv")]
        assert {len(row) for row in rows} == {6}
        assert list(dict.fromkeys(row[0] for row in rows)) == ids(folder, part)
        assert all(row[0].endswith(f"_{row[1]}-{row[2]}") and row[1:3] == row[3:5] for row in rows)
        assert {(row[0], row[5]) for row in rows} == {(v, text) for v in ids(folder, part) for text in said(folder, v)}
        movies.append({row[0].rpartition("_")[0] for row in rows})
        assert all((folder / "videos" / row[0].rpartition("_")[0] / f"{row[0]}.avi").is_file() for row in rows)
        assert (len(rows) > len(ids(folder, part))) == (part == "train")  # an id with two sentences
    assert not movies[0] & movies[1] | movies[1] & movies[2] | movies[0] & movies[2]


def test_activitynet(dataset):
    folder = dataset("activitynet")
    assert not ids(folder, "val")
    for part, name, listed in (("train", "train", "train_ids"), ("test", "val_1", "val_ids")):
        videos = json.loads((folder / f"{name}.json").read_text())
        assert list(videos) == ids(folder, part)
        assert set(json.loads((folder / f"{listed}.json").read_text())) > set(videos)
        for video_id, video in videos.items():
            assert video_id.startswith("v_")
            assert video["sentences"] == said(folder, video_id)
            assert len(video["sentences"]) == len(video["timestamps"]) >= 3
            assert not video["sentences"][0].startswith(" ")
            assert all(sentence.startswith(" ") for sentence in video["sentences"][1:])
            assert all(0 <= start < end <= video["duration"] for start, end in video["timestamps"])


def test_vatex(dataset):
    folder = dataset("vatex")
    data = json.loads((folder / "vatex_data.json").read_text(encoding="utf-8"))
    for part in ("train", "val", "test"):
        assert lines(folder / f"{part}_list.txt") == ids(folder, part)
    for video_id, video in data.items():
        name, start, end = video_id.rsplit("_", 2)
        assert (len(name), int(end) - int(start), len(start)) == (11, 10, 6)
        assert video["enCap"] == said(folder, video_id)
        assert video["chCap"] == scenes(folder)[video_id]["chinese"]
        assert len(video["enCap"]) == len(video["chCap"]) == 10
    official = {
        split: json.loads((folder / f"vatex_{split}_v1.0.json").read_text(encoding="utf-8"))
        for split in ("training", "validation")
    }
    assert [record["videoID"] for record in official["training"]] == ids(folder, "train")
    assert [record["videoID"] for record in official["validation"]] == ids(folder, "val") + ids(folder, "test")
    for record in official["training"] + official["validation"]:
        assert {"enCap": record["enCap"], "chCap": record["chCap"]} == data[record["videoID"]]


def test_msvd(dataset):
    folder = dataset("msvd")
    tokens = pickle.loads((folder / "raw-captions.pkl").read_bytes())
    assert [lines(folder / f"{part}_list.txt") for part in ("train", "val", "test")] == [
        ids(folder, part) for part in ("train", "val", "test")
    ]
    assert list(tokens) == list(scenes(folder))
    for video_id, captions in tokens.items():
        assert [" ".join(caption) for caption in captions] == said(folder, video_id)
        assert (folder / "videos" / f"{video_id}.avi").is_file()
    assert len({len(captions) for captions in tokens.values()}) > 1


def test_charades(dataset):
    folder = dataset("charades")
    assert not ids(folder, "val")
    for part in ("train", "test"):
        content = (folder / f"Charades_v1_{part}.csv").read_bytes()
        assert content.count(b"\r\n") == content.count(b"\n") == len(ids(folder, part)) + 1
        with (folder / f"Charades_v1_{part}.csv").open(newline="") as file:
            rows = {row["id"]: row for row in csv.DictReader(file)}
        assert list(rows) == ids(folder, part)
        spans: dict[str, list[str]] = {}
        for line in lines(folder / f"charades_sta_{part}.txt"):
            place, _, text = line.partition("##")
            video_id, start, end = place.split(" ")
            spans.setdefault(video_id, []).append(text)
            actions = [action.split(" ")[1:] for action in rows[video_id]["actions"].split(";")]
            assert [float(start), float(end)] in [[float(value) for value in action] for action in actions]
        for video_id, row in rows.items():
            assert [row["script"], *spans[video_id]] == said(folder, video_id)
            assert float(row["length"]) == scenes(folder)[video_id]["duration"]


def test_test_sentences_of_multi_caption_datasets_say_something_visible(dataset):
    for name in ("vatex", "msvd"):
        folder = dataset(name)
        for video_id in ids(folder, "test"):
            assert "sound" not in {caption["kind"] for caption in scenes(folder)[video_id]["captions"]}
