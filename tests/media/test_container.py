"""Files of any format: no playlists, limits, and correct frames or an error in limited time for damaged files."""

import io
import socket
import time
from fractions import Fraction
from functools import cache, partial
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
from tvr_lightning.data.video_files import VideoFiles
from tvr_lightning.errors import UserError
from tvr_lightning.media import container, reader
from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.compression import Compression, compress
from tvr_lightning.media.container import MAX_PIXELS, VIDEO_SUFFIXES, MediaError, VideoError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import DecodedClip, frames_at_rate, probe, read_clip, read_parts

WRITTEN = {
    "mp4": "libx264", "mov": "libx264", "3gp": "libx264", "matroska": "libx264", "webm": "libvpx", "avi": "mpeg4",
    "ogg": "libtheora", "flv": "flv1", "asf": "msmpeg4", "mpegts": "mpeg2video", "vob": "mpeg2video",
    "mpeg2video": "mpeg2video", "mxf": "mpeg2video", "rm": "rv10", "nut": "mpeg4", "h264": "libx264", "ivf": "libvpx",
    "gif": "gif",
}  # fmt: skip


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


HLS = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:3,\n{}\n#EXT-X-ENDLIST\n"
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
        playlists = [f"ffconcat version 1.0\nfile '{each}'\n" for each in targets]
        playlists += [HLS.format(each) for each in (target, target.as_uri(), url)] + [SDP.format(port=port)]
        for number, playlist in enumerate(playlists, start=1):
            for path in (videos / f"clip{number}.mp4", videos / f"clip{number}.m3u8"):
                path.write_text(playlist)
                for read in (*READERS, partial(compress, how=Compression())):
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


@cache
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
HARMS = {
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


READERS = [
    probe,
    read_audio,
    lambda path: read_audio(path, span=(0.5, 1.5)),
    lambda path: read_clip(path, frames=2, prepare=Preparation(64)),
    lambda path: read_parts(path, lambda end: [(0.0, end / 2), (end / 2, end)], frames=2, prepare=Preparation(64)),
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
