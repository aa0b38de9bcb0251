"""Readers of damaged files return correct frames, or raise an error that names the file, in limited time."""

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

SECONDS = 10  # CPU time limit for all readers of one file, which take a few hundredths of a second


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
    read_audio(sources[-1])  # import librosa, which takes seconds
    return sources


def overwrite(content: bytes, positions: list[int], value: bytes) -> bytes:
    data = bytearray(content)
    for position in positions:
        data[position : position + len(value)] = value
    return bytes(data)


def flip(content: bytes, positions: list[int]) -> bytes:
    data = bytearray(content)
    for position in positions:
        data[position] ^= 1 << position % 8
    return bytes(data)


def spread(content: bytes, count: int, seed: int, within: int = 2**30) -> list[int]:
    return np.random.default_rng(seed).integers(0, min(within, len(content)) - 4, count).tolist()


NOISE = np.random.default_rng(0).bytes(2**22)
HARMS: dict[str, Callable[[bytes], bytes]] = {
    "cut at a tenth": lambda data: data[: len(data) // 10],
    "cut in the middle": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "only its first bytes": lambda data: data[:12],
    "without its first bytes": lambda data: data[16:],
    "bits flipped in its header": lambda data: flip(data, spread(data, 6, 1, 1200)),
    "bits flipped at its end": lambda data: flip(data, [len(data) - 900 + 150 * n for n in range(6)]),
    "bits flipped everywhere": lambda data: flip(data, spread(data, 60, 2)),
    "greatest numbers in its header": lambda data: overwrite(data, spread(data, 4, 3, 1200), b"\xff\xff\xff\xff"),
    "great numbers in its header": lambda data: overwrite(data, spread(data, 4, 4, 1200), b"\x7f\xff\xff\xff"),
    "zeros in its header": lambda data: overwrite(data, spread(data, 4, 5, 1200), bytes(4)),
    "zeros in the middle": lambda data: overwrite(data, [len(data) // 3], bytes(len(data) // 3)),
    "noise in the middle": lambda data: overwrite(data, [len(data) // 3], NOISE[: len(data) // 3]),
    "twice": lambda data: data + data,
    "its second half first": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
    "after a web page": lambda data: b"<!doctype html><title>Not found</title>" + data,
}


def halves(duration: float) -> list[tuple[float, float]]:
    return [(0.0, duration / 2), (duration / 2, duration)]


READERS = [
    probe,
    read_audio,
    lambda path: read_audio(path, span=(0.5, 1.5)),
    lambda path: read_clip(path, frames=2, prepare=Preparation(64)),
    lambda path: read_parts(path, halves, frames=2, prepare=Preparation(64)),
]


@pytest.mark.parametrize("harm", HARMS)
def test_readers_end_with_correct_frames_or_an_error(sources: list[Path], tmp_path: Path, harm: str) -> None:
    for source in sources:
        path, errors = tmp_path / source.name, []
        path.write_bytes(HARMS[harm](source.read_bytes()))
        began = time.process_time()
        for read in READERS:
            try:
                clip = read(path)
            except MediaError as error:
                errors.append(error)
                continue
            if isinstance(clip, DecodedClip) and path.name == "front.mp4":
                shown = [round(10 * float(second)) for second in clip.timestamps[clip.frame_mask]]
                assert numbers_of(clip.pixels[clip.frame_mask]) == shown
        assert time.process_time() - began < SECONDS
        assert all(f"{path.name}: " in str(error) for error in errors)
        # The errors still exist, with the stack frames that they refer to.
        handles = Path("/proc/self/fd").glob("*")  # none if the system has no /proc
        assert path not in map(Path.resolve, handles), f"{len(errors)} errors keep {path.name} open"


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "KEPT_BYTES", 0)  # so that the packets are read a second time
    path = write_video(tmp_path / "clip.ts", 60)

    def truncate(duration: float) -> list[tuple[float, float]]:
        cut_off(path, 0.3)
        return [(0.0, duration)]

    with pytest.raises(VideoError, match=r"clip\.ts"):
        read_parts(path, truncate, frames=6, prepare=Preparation(64))
