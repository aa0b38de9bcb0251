"""Files of the synthetic datasets in the seven native layouts."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pandas as pd
import pytest

from tvr_lightning.data import LSMDC, MSRVTT, MSVD, VATEX, ActivityNet, Charades, DiDeMo


@pytest.fixture
def dataset(synthetic) -> Callable[[str], Path]:
    return lambda name: synthetic(name, 16 if name == "msrvtt" else 8) / name


def scenes(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "scenes.json").read_text(encoding="utf-8"))
    assert content["dataset"] == folder.name
    return dict(content["videos"])


@pytest.mark.parametrize("name", ["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"])
def test_videos_can_be_decoded_and_match_their_scenes(dataset, name):
    folder = dataset(name)
    videos = scenes(folder)
    assert len(videos) == (16 if name == "msrvtt" else 8)
    files = {str(path.relative_to(folder)) for path in (folder / "videos").rglob("*") if path.is_file()}
    assert files == {video["file"] for video in videos.values()}
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
            assert "sound" not in {caption["kind"] for caption in video["captions"]}, "queries describe visible content"
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
def test_native_files_contain_every_video_with_its_captions(dataset, kind, options):
    folder = dataset(kind.directory)
    data = kind(root=str(folder.parent), **options)
    data.setup()  # refuses splits that share videos
    everything = scenes(folder)
    said = {name: [caption["text"] for caption in video["captions"]] for name, video in everything.items()}
    for part in data.official_splits:
        split = data.read_split(part)
        assert not data.examine_split(part)[1].problems
        found: dict[str, list[str]] = {}
        for text in split.texts:
            video = split.videos[text.video]
            name = video.path.stem if kind is Charades else video.video_id
            assert video.path == folder / everything[name]["file"]
            found.setdefault(name, []).append(text.text)
        expected = {name: said[name] for name, video in everything.items() if video["part"] == part}
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
            expected = {name: said[name] for name, video in everything.items() if video["part"] != "test"}
        assert {name: sorted(texts) for name, texts in found.items()} == {n: sorted(t) for n, t in expected.items()}
        assert kind is MSRVTT or options.get("split") or list(found) == list(expected)


def test_splits_of_msrvtt_are_those_of_its_protocols(dataset):
    folder = dataset("msrvtt")
    names = ("train.9k", "train.7k", "train.full", "val.full", "test.full")
    ids = {name: (folder / f"MSRVTT_{name}.csv").read_text().split()[1:] for name in names}
    listed = {name: set(videos) for name, videos in ids.items()}
    assert all(len(listed[name]) == len(videos) for name, videos in ids.items())
    test = {video.video_id for video in MSRVTT(root=str(folder.parent)).read_split("test").videos}
    assert listed["train.7k"] == listed["train.full"] | listed["val.full"]
    assert listed["train.7k"] | listed["test.full"] == listed["train.9k"] | test == {f"video{i}" for i in range(16)}
    assert listed["test.full"] > test
    for video in json.loads((folder / "MSRVTT_data.json").read_text())["videos"]:
        part = {"train": "train", "validate": "val", "test": "test"}[video["split"]]
        assert video["video_id"] in listed[f"{part}.full"]
