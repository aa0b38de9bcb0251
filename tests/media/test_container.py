"""Readers open video and audio files of any format, but no playlists."""

import socket

import av
import numpy as np
import pytest
from broken_videos import write_sound, write_video

from tvr_lightning.data.video_files import VideoFiles
from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.compression import Compression, compress
from tvr_lightning.media.container import VIDEO_SUFFIXES, MediaError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import probe, read_clip

WRITTEN = {
    "mp4": "libx264", "mov": "libx264", "3gp": "libx264", "matroska": "libx264", "webm": "libvpx", "avi": "mpeg4",
    "ogg": "libtheora", "flv": "flv1", "asf": "msmpeg4", "mpegts": "mpeg2video", "vob": "mpeg2video",
    "mpeg2video": "mpeg2video", "mxf": "mpeg2video", "rm": "rv10", "nut": "mpeg4", "h264": "libx264", "ivf": "libvpx",
    "gif": "gif",
}  # fmt: skip


READERS = [
    lambda path: read_clip(path, frames=2, prepare=Preparation(32)),
    probe,
    read_audio,
    lambda path: compress(path, Compression()),
]


@pytest.mark.parametrize("written", WRITTEN)
def test_common_video_formats_are_read_regardless_of_their_name(tmp_path, written):
    path, codec = tmp_path / "clip", WRITTEN[written]
    try:
        av.Codec(codec, "w")
    except av.codec.codec.UnknownCodecError:
        pytest.skip(f"this FFmpeg does not write {codec}")
    with av.open(str(path), "w", format=written) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 176, 144, "rgb8" if codec == "gif" else "yuv420p"
        for _ in range(5):
            image = av.VideoFrame.from_ndarray(np.full((144, 176, 3), 200, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(image))
        container.mux(stream.encode())
    assert (probe(path).width, probe(path).height) == (176, 144)
    assert read_clip(path, frames=1, prepare=Preparation(32)).pixels.float().mean() > 150
    assert not read_audio(path).present


@pytest.mark.parametrize("suffix", [".m4a", ".mp3", ".wav", ".flac", ".mka", ".ogg"])
def test_audio_files_are_read(tmp_path, suffix):
    path = tmp_path / f"sound{suffix}"
    codec = {".mp3": "libmp3lame", ".wav": "pcm_s16le", ".flac": "flac", ".ogg": "libopus"}.get(suffix, "aac")
    write_sound(path, codec=codec)
    assert read_audio(path).present


def concat(target: object) -> str:
    return f"ffconcat version 1.0\nfile '{target}'\n"


def hls(target: object) -> str:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:3,\n{target}\n#EXT-X-ENDLIST\n"


SDP = """v=0\no=- 0 0 IN IP4 127.0.0.1\ns=-\nc=IN IP4 127.0.0.1\nt=0 0
m=video {port} RTP/AVP 96\na=rtpmap:96 H264/90000
"""


def test_no_reader_follows_a_playlist(tmp_path):
    target = write_video(tmp_path / "elsewhere" / "other.ts", 20, sound=1.0)
    videos = tmp_path / "videos"
    videos.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as host:
        port = host.getsockname()[1]
        host.settimeout(0)
        url = f"http://127.0.0.1:{port}/other.ts"
        targets = ("../elsewhere/other.ts", target, "clip3.mp4", url)  # clip3.mp4: itself
        playlists = [*map(concat, targets), *map(hls, (target, target.as_uri(), url)), SDP.format(port=port)]
        for number, playlist in enumerate(playlists, start=1):
            for path in (videos / f"clip{number}.mp4", videos / f"clip{number}.m3u8"):
                path.write_text(playlist)
                for read in READERS:
                    with pytest.raises(MediaError, match=rf"{path.name}: .*cannot be opened"):
                        read(path)
                path.unlink()
        with pytest.raises(BlockingIOError):
            host.accept()


def test_videos_are_found_by_stem_with_any_suffix(tmp_path, monkeypatch):
    for name in ("a.m3u8", "b.srt", "b.AVI", "c", "d.webm.part", "e_02.07.409.webm"):
        (tmp_path / name).touch()
    videos = VideoFiles(tmp_path, ".mp4")
    found = [videos.find(name).name for name in [*"abcd", "e_02.07.409"]]
    assert found == ["a.mp4", "b.AVI", "c", "d.mp4", "e_02.07.409.webm"]
    assert ".m3u8" not in VIDEO_SUFFIXES
    write_video(tmp_path / "plain.mp4", 20).rename(tmp_path / "12:30.mp4")  # the colon does not make it a URL
    monkeypatch.chdir(tmp_path)
    assert probe("12:30.mp4").frames == 20
