"""Scenes, videos, audio and captions of the synthetic datasets, and their files in the seven native layouts."""

import functools
import json
import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pytest
from child_processes import fork

from tvr_lightning.data import LSMDC, MSRVTT, MSVD, VATEX, ActivityNet, Charades, DiDeMo
from tvr_lightning.errors import UserError
from tvr_lightning.files import file_lock
from tvr_lightning.synthetic import synthesize
from tvr_lightning.synthetic.chinese import chinese_caption
from tvr_lightning.synthetic.grammar import captions, describe_scene, query
from tvr_lightning.synthetic.render import render
from tvr_lightning.synthetic.scene import (
    BACKDROP_COLORS,
    MOTIONS,
    PATTERNS,
    SHAPES,
    SOUNDS,
    Backdrop,
    Event,
    Figure,
    Scene,
    Timing,
    draw_scenes,
)
from tvr_lightning.synthetic.write import RATE, waveform, write_video

TWO = Timing(events=(2, 2), least=6, most=10, step=0.5)


def draw(count: int, *, held_out: bool = False, name: str = "test") -> list[Scene]:
    return draw_scenes(name, count, TWO, held_out=held_out, seen=set(), offset=0)


def one_event(motion: str, shape: str = "square") -> Scene:
    event = Event(Figure(shape, "red", "large"), motion, 0.0, 3.0, (0.5, 0.5))
    return Scene((event,), Backdrop("white", "plain"), "silence", True, 1.0, False)


def figure_mask(scene: Scene) -> np.ndarray:
    """(T, H, W) bool: red pixels."""
    frames = render(scene, 10).astype(int)
    return (frames[..., 0] > 150) & (frames[..., 1] < 90)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestScenes:
    def test_every_factor_occurs_and_held_out_videos_are_new_combinations(self):
        figures = []
        for scenes in (draw(500), draw(300, held_out=True)):
            events = [event for scene in scenes for event in scene.events]
            assert {event.figure.shape for event in events} == set(SHAPES)
            assert {event.motion for event in events} == set(MOTIONS)
            assert {scene.sound for scene in scenes} == set(SOUNDS)
            backdrops = {(scene.backdrop.color, scene.backdrop.pattern) for scene in scenes}
            assert backdrops == {(color, pattern) for color in BACKDROP_COLORS for pattern in PATTERNS}
            figures.append({tuple((e.figure.shape, e.figure.color) for e in scene.events) for scene in scenes})
        assert not figures[0] & figures[1]

    def test_only_twins_have_the_same_frames(self):
        scenes = draw(400)
        looks: dict[object, list[int]] = {}
        for index, scene in enumerate(scenes):
            looks.setdefault(scene.look(), []).append(index)
        twins = {index: scene.twin for index, scene in enumerate(scenes) if scene.twin is not None}
        groups = {frozenset(group) for group in looks.values() if len(group) > 1}
        assert groups == {frozenset(pair) for pair in twins.items()}
        assert all(scenes[a].sound != scenes[b].sound for a, b in twins.items())
        assert 0.1 < len(twins) / len(scenes) < 0.3

    def test_events_are_consecutive_and_round_figures_do_not_spin(self):
        for scene in draw(300):
            assert scene.events[0].start == 0
            assert scene.events[0].end == scene.events[1].start
            assert 6 <= scene.duration <= 10
            assert not any(e.motion == "spin" and e.figure.shape in ("circle", "ring") for e in scene.events)
            first, second = scene.events
            assert (first.figure, first.motion) != (second.figure, second.motion)


class TestFrames:
    @pytest.mark.parametrize(
        ("motion", "axis", "sign"), [("right", 2, 1), ("left", 2, -1), ("up", 1, -1), ("down", 1, 1)]
    )
    def test_figures_move_in_their_direction(self, motion, axis, sign):
        centers = np.array([np.argwhere(mask).mean(0)[axis - 1] for mask in figure_mask(one_event(motion))])
        assert (sign * np.diff(centers) > 0).all()
        assert abs(centers[-1] - centers[0]) > 25

    def test_figures_change_their_size(self):
        for motion, order in (("grow", 1), ("shrink", -1)):
            area = figure_mask(one_event(motion)).sum((1, 2))[::order]
            assert (np.diff(area) >= 0).all()
            assert area[-1] > 3 * area[0]


def pitch(samples: np.ndarray) -> float:
    """Frequency in Hz with the highest amplitude."""
    return float(np.argmax(np.abs(np.fft.rfft(samples))) * RATE / len(samples))


def test_sounds_have_their_pitch_rhythm_and_direction():
    sounds = {sound: waveform(sound, 2.0) for sound in SOUNDS}
    assert {sound for sound, samples in sounds.items() if not samples.any()} == {"silence"}
    assert len({samples.tobytes() for samples in sounds.values()}) == len(SOUNDS)
    assert all(np.abs(samples).max() <= 1 for samples in sounds.values())
    for sound, frequency in (("low hum", 220), ("fast low beeps", 220), ("high hum", 1760), ("slow high beeps", 1760)):
        assert pitch(waveform(sound, 4.0)) == pytest.approx(frequency, abs=5)
    for sound, beeps in (("slow low beeps", 4), ("fast low beeps", 16), ("low hum", 1)):
        loud = np.abs(waveform(sound, 4.0)).reshape(-1, RATE // 40).max(1) > 0.05
        assert np.diff(loud.astype(int), prepend=0).clip(0).sum() == beeps
    for sound, sign in (("rising sweep", 1), ("falling sweep", -1)):
        assert (sign * np.diff([pitch(part) for part in sounds[sound].reshape(8, -1)]) > 0).all()


class TestCaptions:
    def test_captions_mention_what_they_describe(self):
        for index, scene in enumerate(draw(60)):
            rng = random.Random(index)
            for caption in captions(scene, 20, rng):
                assert ("backdrop" in caption.mentions) == (scene.backdrop.color in caption.text)
                sized = {"large", "big", "small", "little"} & set(caption.text.split())
                assert ("size" in caption.mentions) == bool(sized)
            assert not any(character.isascii() for character in chinese_caption(scene, rng).text)
        assert len({describe_scene(scene) for scene in draw(200)}) == 200

    def test_queries_of_twins_mention_the_audio(self):
        scenes = draw(100)
        for index, scene in enumerate(scenes):
            if scene.twin is not None:
                assert "sound" in query(scene, random.Random(index)).mentions
                assert (render(scene, 4) == render(scenes[scene.twin], 4)).all()


@pytest.mark.parametrize(("suffix", "codecs"), [(".mp4", ("h264", "aac")), (".avi", ("mpeg4", "mp3float"))])
def test_a_file_contains_the_frames_and_the_audio_of_its_scene(tmp_path, suffix, codecs):
    scene = next(scene for scene in draw(20) if scene.sound == "high hum")
    path = tmp_path / f"clip{suffix}"
    write_video(scene, path, 10)
    with av.open(str(path)) as container:
        assert tuple(stream.codec_context.name for stream in container.streams) == codecs
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        container.seek(0)
        samples = np.concatenate([frame.to_ndarray().ravel() for frame in container.decode(audio=0)])
    drawn = render(scene, 10)
    assert frames.shape == drawn.shape
    assert np.abs(frames.astype(int) - drawn).mean() < 8  # of 255; the codecs lose some color at edges
    assert len(samples) / RATE == pytest.approx(scene.duration, abs=0.3)
    assert pitch(samples) == pytest.approx(1760, abs=5)


def test_the_files_depend_on_seed_and_layout_but_not_on_workers_and_are_reused(tmp_path, synthetic):
    dead = tmp_path / ".lsmdc-unfinished"  # from a killed process
    (dead / "videos").mkdir(parents=True)
    write = functools.partial(synthesize, "lsmdc", tmp_path, 8, workers=2, progress=False)
    lock = file_lock(tmp_path / ".lsmdc-unfinished.lock", "it")
    with lock, pytest.raises(UserError, match="Another process is writing the dataset"):
        write(0)
    assert dead.exists()
    folder = write(0)
    assert not dead.exists()
    assert files_of(folder) == files_of(synthetic("lsmdc", 8) / "lsmdc")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert write(0) == folder
    with pytest.raises(UserError, match=r"is not this dataset \(8 videos, seed 1\)\. Remove it"):
        write(1)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    described = set()
    other = synthesize("lsmdc", tmp_path / "other", 8, 1, workers=1, progress=False)
    for each in (folder, synthetic("msvd", 8) / "msvd", other):
        videos = json.loads((each / "scenes.json").read_text())["videos"]
        described |= {video["description"] for video in videos.values()}
    assert len(described) >= 3 * 8 - 6  # twins share most of their description


@pytest.mark.parametrize(
    ("dataset", "videos", "message"),
    [
        ("imagenet", 12, "no layout for dataset 'imagenet'; choose one of msrvtt, didemo"),
        ("msrvtt", 7, "videos=7 leaves no training videos; it must be at least 8"),
        ("msvd", 8, "msvd already exists"),
    ],
)
def test_wrong_arguments_change_nothing(tmp_path, dataset, videos, message):
    (tmp_path / "msvd").mkdir()
    (tmp_path / "msvd" / "train_list.txt").write_text("mine")
    with pytest.raises(ValueError, match=message):
        synthesize(dataset, tmp_path, videos, 0, progress=False)
    assert files_of(tmp_path) == {"msvd/train_list.txt": b"mine"}


def test_an_interrupted_call_leaves_nothing(tmp_path, ended):
    write = functools.partial(synthesize, workers=1, progress=False)
    process = ended(fork(write, "msrvtt", tmp_path, 400, 0))
    while process.is_alive() and not list(tmp_path.glob(".msrvtt-unfinished/videos/*")):
        time.sleep(0.05)
    while process.is_alive():  # some code ignores the signal: send it again
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
    assert process.exitcode == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def dataset(synthetic):
    return lambda name: synthetic(name, 16 if name == "msrvtt" else 8) / name


def scenes(folder: Path) -> dict:
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
        assert (video["part"] == "test") == video["scene"]["held_out"]
        for caption in video["captions"]:
            if caption["kind"].startswith("event"):
                event = events[int(caption["kind"].removeprefix("event")) - 1]
                assert caption["span"] == [event["start"], event["end"]]
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
