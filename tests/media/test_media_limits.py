"""Limits on frames, packets, length and CPU time, which malicious files exceed and ordinary files do not."""

import io
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from broken_videos import write_video
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
from tvr_lightning.media.video import frames_at_rate, probe, read_clip


def png(width: int, height: int) -> bytes:
    """A black image, compressed to a thousandth of its size."""
    content = io.BytesIO()
    Image.new("L", (width, height)).save(content, "png")
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
@pytest.mark.parametrize(("function", "stated"), [(read, (6400, 6400)), (probe, (6400, 6400)), (read, (64, 64))])
def test_frames_above_the_limit_are_not_decoded(tmp_path, name, function, stated):
    path = write_packets(tmp_path / name, png(6400, 6400), 3, stated)
    assert path.stat().st_size < 3 * 2**20
    began = time.process_time()
    with pytest.raises(VideoError, match=rf"{name}: .*too large: the maximum is {MAX_PIXELS:,} pixels"):
        function(path)
    assert time.process_time() - began < 0.5, "decoding a single one takes longer"


def test_the_largest_common_frames_are_read_but_not_lines_of_pixels(tmp_path):
    path = write_video(
        tmp_path / "large.mov", 1, size=(8192, 4352), codec="mjpeg", pixel_format="yuvj420p", rate=1,
        picture=lambda number, width, height: np.full((height, width, 3), 100, dtype=np.uint8),
    )  # fmt: skip
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


@pytest.mark.parametrize("frames_of", ["read_clip", "frames_at_rate"])
def test_time_spent_on_decoded_frames_does_not_count(tmp_path, frames_of, monkeypatch):
    path = write_video(tmp_path / "short.mp4", 30)
    monkeypatch.setenv(container.READ_SECONDS, "0.5")

    def transform(image):
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
        return np.asarray(image)

    if frames_of == "read_clip":
        read_clip(path, frames=10, sampling="segment-centres", prepare=transform)
    else:
        assert len(list(frames_at_rate(path, 5, transform))) == 15


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
