"""Malicious and damaged files: limits, and correct frames or an error in limited time."""

import functools
import io
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from broken_videos import cut_off, numbers_of, write_sound, write_video
from PIL import Image
from sound_files import tone, write_clip

from tvr_lightning.data.audio_alignment import AudioOptions
from tvr_lightning.data.datasets import VideoDataset
from tvr_lightning.data.readers import MediaReader
from tvr_lightning.data.records import Split, VideoRecord
from tvr_lightning.errors import UserError
from tvr_lightning.media import container, reader
from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.container import MAX_PIXELS, MediaError, VideoError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import DecodedClip, frames_at_rate, probe, read_clip, read_parts


@functools.cache
def png(width: int, height: int) -> bytes:
    """A gray image, compressed to a thousandth of its size."""
    content = io.BytesIO()
    Image.new("L", (width, height), 100).save(content, "png")
    return content.getvalue()


def write_packets(path: Path, data: bytes, count: int, size: tuple[int, int]) -> Path:
    """Write `count` packets of the same bytes into a container that declares frames of `size`."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, "gray"
        stream.time_base = Fraction(1, 10)
        for number in range(count):
            packet = av.Packet(data)
            packet.pts = packet.dts = number
            packet.duration, packet.time_base, packet.stream, packet.is_keyframe = 1, stream.time_base, stream, True
            container.mux(packet)
    return path


def read(path: Path) -> None:
    read_clip(path, frames=3, prepare=Preparation(32))


@pytest.mark.parametrize("name", ["a.mov", "a.nut", "a.avi"])
def test_frames_above_the_limit_are_not_decoded(tmp_path, name):
    for function, stated in ((read, (6400, 6400)), (probe, (6400, 6400)), (read, (64, 64))):
        path = write_packets(tmp_path / name, png(6400, 6400), 3, stated)
        assert path.stat().st_size < 3 * 2**20
        began = time.process_time()
        with pytest.raises(VideoError, match=rf"{name}: .*too large: the maximum is {MAX_PIXELS:,} pixels"):
            function(path)
        assert time.process_time() - began < 0.5, "decoding a single one takes longer"


def test_the_largest_common_frames_are_read_but_not_lines_of_pixels(tmp_path):
    path = write_packets(tmp_path / "large.mov", png(8192, 4352), 1, (8192, 4352))
    assert 95 < read_clip(path, frames=1, prepare=Preparation(64)).pixels.float().mean() < 105
    path = write_video(tmp_path / "line.mkv", 3, size=(8192, 16), codec="ffv1", pixel_format="gray")
    with pytest.raises(VideoError, match=r"line\.mkv: its frames have 8,192 x 16 pixels; one side may be at most 100"):
        read(path)


@pytest.mark.parametrize("name", ["a.mov", "a.nut"])
def test_files_with_too_many_packets_are_refused(tmp_path, name, monkeypatch):
    monkeypatch.setattr(container, "MAX_PACKETS", 300)
    path = write_packets(tmp_path / name, png(16, 16), 301, (16, 16))
    for function in (read, probe):
        with pytest.raises(VideoError, match=rf"{name}: contains a stream of at least 301 packets; the maximum is 300"):
            function(path)
    assert probe(write_packets(tmp_path / name, png(16, 16), 300, (16, 16))).frames == 300
    path = write_video(tmp_path / "clip.mp4", 60, options={"g": "10"})
    kept = read_clip(path, frames=6, prepare=Preparation(64)).pixels
    monkeypatch.setattr(reader, "KEPT_BYTES", 50_000)  # the other packets are read again
    assert (read_clip(path, frames=6, prepare=Preparation(64)).pixels == kept).all()
    sound = write_clip(tmp_path / "sound.mkv", tone(20.0), seconds=20.0, codec="aac")
    with pytest.raises(MediaError, match=r"sound\.mkv: contains a stream of at least 301 packets"):
        read_audio(sound)


@pytest.mark.parametrize("function", [read, probe, read_audio])
def test_the_time_limit_of_a_file_can_be_set(tmp_path, function, monkeypatch):
    path = write_packets(tmp_path / "slow.mov", png(1500, 1500), 300, (1500, 1500))
    if function is read_audio:
        path = write_clip(tmp_path / "slow.mkv", tone(60.0), seconds=60.0, codec="flac")
    function(path)
    monkeypatch.setenv(container.READ_SECONDS, "0.001")
    with pytest.raises(MediaError, match=r"slow\.m\w+: .*took more than 0\.001 s of .*time; .*TVR_READ_SECONDS"):
        function(path)
    monkeypatch.setenv(container.READ_SECONDS, "soon")
    with pytest.raises(UserError, match="TVR_READ_SECONDS is 'soon'"):
        function(path)


def test_time_spent_on_decoded_frames_does_not_count(tmp_path, monkeypatch):
    path = write_video(tmp_path / "short.mp4", 30)
    monkeypatch.setenv(container.READ_SECONDS, "0.3")

    def transform(image):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return Preparation(32)(image)

    read_clip(path, frames=10, sampling="segment-centers", prepare=transform)
    assert len(list(frames_at_rate(path, 4, transform))) == 12


def test_a_false_length_is_refused(tmp_path):
    path = write_video(tmp_path / "far.mkv", 2, stamps=[0, 2 * 10**12])
    with pytest.raises(VideoError, match=r"far\.mkv: lasts 2,0\d\d,\d\d\d,\d\d\d s according to its timestamps"):
        read(path)
    path = write_video(tmp_path / "day.mkv", 2, stamps=[0, 10**8], sound=1.0)
    with pytest.raises(MediaError, match=r"day\.mkv: its audio is [\d,]+ samples long; the maximum is 1,073,741,824"):
        read_audio(path)
    split = Split("test", "any", [VideoRecord("day", path)], [])
    reader = MediaReader(2, Preparation(32), "one-fps-uniform", audio=AudioOptions("wav2vec2"), on_corrupt="skip")
    (skipped,) = VideoDataset(split, reader, skip=True)[0].skipped
    assert "day.mkv: its audio is" in skipped


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
        assert time.process_time() - began < 10, "the readers take a few hundredths of a second"
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
