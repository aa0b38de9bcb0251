"""Containers are told by their first bytes, as FFmpeg writes them."""

import av
import numpy as np
import pytest

from tvr_lightning.search.containers import HEAD, container_of

WRITTEN = [
    ("mp4", "mp4", "libx264"),
    ("mov", "mp4", "libx264"),
    ("3gp", "mp4", "libx264"),
    ("matroska", "matroska", "libx264"),
    ("webm", "matroska", "libvpx"),
    ("avi", "avi", "mpeg4"),
    ("ogg", "ogg", "libtheora"),
    ("flv", "flv", "flv1"),
    ("asf", "asf", "msmpeg4"),
    ("mpegts", "mpegts", "mpeg2video"),
    ("vob", "mpeg", "mpeg2video"),
    ("mpeg2video", "mpegvideo", "mpeg2video"),
]


@pytest.mark.parametrize(("written", "told", "codec"), WRITTEN, ids=[row[0] for row in WRITTEN])
def test_what_ffmpeg_writes_is_told(tmp_path, written, told, codec):
    path = tmp_path / "clip"
    try:
        av.Codec(codec, "w")
    except av.codec.codec.UnknownCodecError:
        pytest.skip(f"this FFmpeg does not write {codec}")
    with av.open(str(path), "w", format=written) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 176, 144, "yuv420p"
        for _ in range(3):
            picture = av.VideoFrame.from_ndarray(np.zeros((144, 176, 3), dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    assert container_of(path.read_bytes()[:HEAD]) == told


@pytest.mark.parametrize(
    "head",
    [b"", b"#EXTM3U\n", b"ffconcat version 1.0\n", b'<?xml version="1.0"?><MPD>', b"<html>", b"\x47", b"RIFF....WAVE"],
)
def test_anything_else_is_none(head):
    assert container_of(head) is None


def test_all_real_clips_are_told(test_data):
    kinds = {".mp4": "mp4", ".avi": "avi", ".mkv": "matroska", ".webm": "matroska"}
    for path in (test_data / "clips" / "videos").iterdir():
        with path.open("rb") as file:
            assert container_of(file.read(HEAD)) == kinds[path.suffix]
