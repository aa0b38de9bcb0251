"""Every reader ends on every damaged or mislabelled file: with true frames, or a sentence that names the file."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from broken_videos import cut_off, numbers_of, write_sound, write_video

from tvr_lightning.media import reader
from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.container import MediaError, VideoError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import DecodedClip, probe, read_clip, read_parts

SECONDS = 10  # of processor time for all readers of one file, which take a few hundredths


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, options = tmp_path_factory.mktemp("sources"), {"g": "10", "bf": "0"}
    sources = [
        write_video(folder / "front.mp4", 30, sound=3.0, options=options, container_options={"movflags": "faststart"}),
        write_video(folder / "parts.mp4", 30, container_options={"movflags": "frag_keyframe+empty_moov"}),
        write_video(folder / "plain.mkv", 30, sound=3.0),
        write_video(folder / "plain.webm", 30, codec="libvpx"),
        write_video(folder / "plain.avi", 30, codec="mpeg4"),
        write_video(folder / "plain.ts", 30, sound=3.0),
        write_video(folder / "plain.mov", 30, codec="mjpeg", pixel_format="yuvj420p"),
        write_sound(folder / "sound.m4a"),
        write_sound(folder / "sound.ogg", codec="libopus"),
    ]
    read_audio(sources[-1])  # which imports librosa, and is not to be counted as the reading of a harmed file
    return sources


def _overwrite(content: bytes, places: list[int], value: bytes) -> bytes:
    data = bytearray(content)
    for place in places:
        data[place : place + len(value)] = value
    return bytes(data)


def _flip(content: bytes, places: list[int]) -> bytes:
    data = bytearray(content)
    for place in places:
        data[place] ^= 1 << place % 8
    return bytes(data)


def _spread(content: bytes, count: int, seed: int, within: int | None = None) -> list[int]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, min(within or len(content), len(content)) - 4, count).tolist()


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "cut at a tenth": lambda data: data[: len(data) // 10],
    "cut in the middle": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "only its first bytes": lambda data: data[:12],
    "without its first bytes": lambda data: data[16:],
    "bits flipped in its header": lambda data: _flip(data, _spread(data, 6, 1, 1200)),
    "bits flipped at its end": lambda data: _flip(data, [len(data) - 900 + 150 * n for n in range(6)]),
    "bits flipped everywhere": lambda data: _flip(data, _spread(data, 60, 2)),
    "greatest numbers in its header": lambda data: _overwrite(data, _spread(data, 4, 3, 1200), b"\xff\xff\xff\xff"),
    "great numbers in its header": lambda data: _overwrite(data, _spread(data, 4, 4, 1200), b"\x7f\xff\xff\xff"),
    "zeros in its header": lambda data: _overwrite(data, _spread(data, 4, 5, 1200), bytes(4)),
    "zeros in the middle": lambda data: _overwrite(data, [len(data) // 3], bytes(len(data) // 3)),
    "noise in the middle": lambda data: _overwrite(
        data, [len(data) // 3], np.random.default_rng(0).bytes(len(data) // 3)
    ),
    "twice": lambda data: data + data,
    "its second half first": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
    "behind a page": lambda data: b"<!doctype html><title>Not found</title>" + data,
}


def _attempt(read: Callable[[], object], name: str) -> list[BaseException]:
    """The error that reading ended with, if any, which names the file; anything but a sentence is raised."""
    try:
        read()
    except MediaError as error:
        if f"{name}: " not in str(error):
            raise
        return [error]
    return []


def _look(path: Path) -> list[BaseException]:
    halves = lambda duration: [(0.0, duration / 2), (duration / 2, duration)]  # noqa: E731
    return [
        error
        for read in (
            lambda: probe(path),
            lambda: read_audio(path),
            lambda: read_audio(path, span=(0.5, 1.5)),
            lambda: read_clip(path, frames=2, prepare=Preparation(32)),
            lambda: read_parts(path, halves, frames=2, prepare=Preparation(32)),
        )
        for error in _attempt(read, path.name)
    ]


@pytest.mark.parametrize("harm", HARMS)
def test_readers_end_and_close_the_file(sources: list[Path], tmp_path: Path, harm: str) -> None:
    for source in sources:
        path = tmp_path / source.name
        path.write_bytes(HARMS[harm](source.read_bytes()))
        began = time.process_time()
        errors = _look(path)
        assert time.process_time() - began < SECONDS
        # The errors, and the frames of the stack that they hold, are still there.
        handles = Path("/proc/self/fd").glob("*")  # none where the system does not tell
        assert path not in map(Path.resolve, handles), f"{len(errors)} errors hold {path.name} open"


@pytest.mark.parametrize("harm", HARMS)
def test_frames_are_true_or_refused(sources: list[Path], tmp_path: Path, harm: str) -> None:
    """What is read of a file whose pictures themselves are whole, is what was written."""
    source = next(source for source in sources if source.name == "front.mp4")
    path = tmp_path / source.name
    path.write_bytes(HARMS[harm](source.read_bytes()))
    clips: list[DecodedClip] = []
    _attempt(lambda: clips.append(read_clip(path, frames=3, prepare=Preparation(64))), path.name)
    for clip in clips:
        shown = [round(10 * float(second)) for second in clip.timestamps[clip.frame_mask]]
        assert numbers_of(clip.pixels[clip.frame_mask]) == shown


def test_a_file_that_shrinks_while_it_is_read_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "KEPT_BYTES", 0)  # so that the packets are read a second time
    path = write_video(tmp_path / "clip.ts", 60)

    def divide(duration: float) -> list[tuple[float, float]]:
        cut_off(path, 0.3)
        return [(0.0, duration)]

    with pytest.raises(VideoError, match=r"clip\.ts"):
        read_parts(path, divide, frames=6, prepare=Preparation(64))
