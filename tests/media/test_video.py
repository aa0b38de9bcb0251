"""Frames of clips: the selected ones, upright and in order, or an error that names the file."""

import itertools
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import VideoReformatter
from broken_videos import (
    cut_off,
    lie_about_length,
    numbers_of,
    rename_codec,
    scramble,
    stop_clock,
    write_song,
    write_sound,
    write_video,
)
from PIL import Image

from tvr_lightning.media.container import VideoError
from tvr_lightning.media.decoder import orientation_of, upright_image
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.reader import open_reader
from tvr_lightning.media.video import DecodedClip, frames_at_rate, probe, read_clip, read_parts

FASTSTART = {"movflags": "faststart"}
SHORT_GROUPS = {"g": "10", "bf": "3", "sc_threshold": "0"}
OPEN_GROUPS = {"g": "20", "bf": "3", "x264-params": "open-gop=1:b-pyramid=normal:scenecut=0"}


def read(path: Path, frames: int = 6, **options: object) -> DecodedClip:
    return read_clip(path, frames, **{"prepare": Preparation(64), **options})


def assert_decoded(path: Path, clip: DecodedClip) -> None:
    """Compare the frames of a clip with those at the same times of decoding the whole file."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    times = np.sort([frame.time for frame in frames])
    for pixels, time in zip(clip.pixels, clip.timestamps, strict=True):
        frame = frames[np.abs(times - times[0] - float(time)).argmin()]
        expected = Preparation(64)(frame.to_image()).transpose(2, 0, 1)
        np.testing.assert_array_equal(pixels.numpy(), expected, err_msg=str(path))


@pytest.mark.parametrize(
    "options", [SHORT_GROUPS, OPEN_GROUPS, {"g": "250"}, {"bf": "0", "g": "7"}, {"intra-refresh": "1"}]
)
def test_frames_equal_those_of_decoding_everything(tmp_path, options):
    path = write_video(tmp_path / "clip.mp4", 65, options=options, size=(66, 66))  # not a multiple of 4
    for sampling in ("one-fps-uniform", "segment-centers", "head", "tail"):
        assert_decoded(path, read(path, 7, sampling=sampling))


@pytest.mark.parametrize(
    ("name", "codec", "pixel_format", "size"),
    [("a.mp4", "libx264", "yuv420p", (64, 64)), ("a.mkv", "libx264", "yuv444p", (64, 64)),
     ("a.ts", "libx264", "yuv420p", (64, 64)), ("a.avi", "libx264", "yuv420p", (64, 64)),
     ("a.avi", "mpeg4", "yuv420p", (64, 64)), ("a.webm", "libvpx", "yuv420p", (64, 64)),
     ("a.webm", "libvpx-vp9", "yuv420p", (64, 64)), ("a.mov", "mjpeg", "yuvj420p", (64, 64)),
     ("a.mp4", "libx265", "yuv420p", (64, 64)), ("a.mkv", "ffv1", "gray", (64, 64)),
     ("a.mp4", "libx264", "yuv420p10le", (64, 64)), ("a.mp4", "libx264", "yuv444p", (67, 65)),
     ("a.mp4", "libx264", "yuv422p", (66, 65))],
)  # fmt: skip
def test_containers_codecs_pixel_formats_and_sizes(tmp_path, name, codec, pixel_format, size):
    path = write_video(tmp_path / name, 40, codec=codec, pixel_format=pixel_format, size=size)
    clip = read(path, 4)
    assert numbers_of(clip.pixels) == [0, 10, 20, 30]
    assert clip.frame_mask.all()
    torch.testing.assert_close(clip.timestamps, torch.arange(4.0), atol=2e-3, rtol=0)
    info = probe(path)
    assert (info.width, info.height, info.frames, info.has_audio) == (*size, 40, False)
    assert (info.fps, info.duration) == (pytest.approx(10.0, rel=0.03), pytest.approx(4.0, abs=0.11))


def test_unneeded_frames_are_not_decoded(tmp_path):
    path = write_video(tmp_path / "clip.mp4", 100, options=SHORT_GROUPS)
    with open_reader(path) as video:
        wanted = int(video.timeline.stamps[47])
        (run,), _ = video.plan([wanted])
        assert video.keyframe[run[0]], "the segment up to the frame starts at a keyframe"
        assert len(run) <= 10, "it ends at the frame"
        stamps = [frame.pts for frame in video.decode_packets([wanted])]
    assert wanted in stamps
    assert len(stamps) <= len(run) - 2, "frames that no other frame refers to are skipped"


@pytest.mark.parametrize(
    ("frames", "sampling", "numbers", "padding"),
    [(25, "one-fps-uniform", [0, 10, 20], 3), (1, "one-fps-uniform", [0], 5),
     (3, "segment-centers", [0, 1, 2, 2, 2, 2], 0)],
)  # fmt: skip
def test_short_clips_are_padded_or_repeat_their_last_frame(tmp_path, frames, sampling, numbers, padding):
    path = write_video(tmp_path / "clip.mp4", frames)
    clip = read(path, 6, sampling=sampling)
    assert clip.frame_mask.tolist() == [True] * len(numbers) + [False] * padding
    assert numbers_of(clip.pixels[: len(numbers)]) == numbers
    assert clip.pixels[len(numbers) :].sum() == 0
    assert clip.duration == pytest.approx(frames / 10)
    assert probe(path).frames == frames


def test_a_span_contains_the_frames_of_its_time(tmp_path):
    path = write_video(tmp_path / "clip.mp4", 100, options=SHORT_GROUPS)
    clip = read(path, 6, span=(3.0, 7.0))
    assert numbers_of(clip.pixels[clip.frame_mask]) == [30, 40, 50, 60]
    assert numbers_of(read(path, 2, span=(9.0, 60.0), sampling="segment-centers").pixels) == [92, 97]
    with pytest.raises(VideoError, match=r"clip.mp4: the span \(10.5, 12.0\) begins after its last frame"):
        read(path, span=(10.5, 12.0))


@pytest.mark.parametrize("name", ["a.mp4", "a.avi"])
def test_parts_of_a_file_are_the_clips_of_their_spans(tmp_path, name):
    path = write_video(tmp_path / name, 100, options=SHORT_GROUPS)
    parts = lambda duration: [(0.0, duration / 2), (2.0, 3.0), (duration / 2, duration)]  # noqa: E731
    clips = read_parts(path, parts, frames=4, prepare=Preparation(64))
    for span, clip in zip([(0.0, 5.0), (2.0, 3.0), (5.0, 10.0)], clips, strict=True):
        alone = read(path, 4, sampling="segment-centers", span=span)
        assert torch.equal(clip.pixels, alone.pixels)
        assert torch.equal(clip.timestamps, alone.timestamps)
    with pytest.raises(VideoError, match="begins after its last frame"):
        read_parts(path, lambda duration: [(0.0, 1.0), (duration + 1, duration + 2)], frames=4, prepare=Preparation(64))


def test_frames_of_variable_rate_are_sampled_by_time(tmp_path):
    # Four seconds at 20 frames per second, then four at 2: most frames are in the first half.
    stamps = [50 * k for k in range(80)] + [4000 + 500 * k for k in range(8)]
    path = write_video(tmp_path / "clip.mp4", 88, stamps=stamps)
    clip = read(path, 8)
    torch.testing.assert_close(clip.timestamps, torch.arange(8.0), atol=2e-3, rtol=0)
    assert numbers_of(clip.pixels) == [0, 20, 40, 60, 80, 82, 84, 86]
    centers = read(path, 8, sampling="segment-centers").timestamps
    assert (centers - torch.arange(0.5, 8)).abs().max() <= 0.5


@pytest.mark.parametrize(
    ("name", "options", "harm"),
    [
        ("late.mkv", {"stamps": [2000 + 100 * k for k in range(30)], "sound": 5.0}, None),
        ("negative.ts", {"stamps": [100 * k - 700 for k in range(30)],
                         "container_options": {"avoid_negative_ts": "disabled", "muxdelay": "0"}}, None),
        ("long-sound.mkv", {"sound": 9.0}, None),
        ("header-promises-too-much.mp4", {}, lambda path: lie_about_length(path, 50)),
    ],
)  # fmt: skip
def test_time_starts_at_the_first_frame(tmp_path, name, options, harm):
    path = write_video(tmp_path / name, 30, **options)
    if harm is not None:
        harm(path)
    clip = read(path, 4)
    assert numbers_of(clip.pixels[clip.frame_mask]) == [0, 10, 20]
    assert clip.timestamps.min() == 0
    assert clip.duration == pytest.approx(3.0, abs=0.11)
    assert probe(path).broken is None
    assert probe(path).has_audio == ("sound" in options)


def test_display_matrices_rotate_and_mirror_as_defined():
    """A stored pixel (x, y) is displayed at (a x + c y, b x + d y); a singular matrix changes nothing."""
    stored = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    places = np.array([(x, y) for y in range(2) for x in range(3)])
    units = [(1, 0), (0, 1), (-1, 0), (0, -1)]
    for (a, b), (c, d) in itertools.product(units, units):
        matrix = np.array([a, b, 0, c, d, 0, 0, 0, 1], dtype=np.int32).tobytes()
        turn = orientation_of(SimpleNamespace(side_data={"DISPLAYMATRIX": matrix}))
        if a * d == b * c:
            assert turn is None
            continue
        x, y = (places @ np.array([(a, b), (c, d)])).T
        expected = np.empty((np.ptp(y) + 1, np.ptp(x) + 1), dtype=np.uint8)
        expected[y - y.min(), x - x.min()] = np.arange(6)
        displayed = stored if turn is None else stored.transpose(turn)
        np.testing.assert_array_equal(np.asarray(displayed), expected)


def test_rotation_is_applied(tmp_path):
    path = write_video(tmp_path / "clip.mp4", 12, size=(128, 64), rotation=90)
    turned = read(path, 1).pixels.rot90(3, dims=(-2, -1))
    assert (probe(path).width, probe(path).height) == (64, 128)
    stored = read(write_video(tmp_path / "stored.mp4", 12, size=(128, 64)), 1).pixels
    assert (turned.float() - stored.float()).abs().mean() < 2


def test_frames_without_timestamps_have_the_declared_rate(tmp_path):
    path = write_video(tmp_path / "clip.mp4", 60, options={"bf": "0"})
    assert probe(path).timed
    timed = {sampling: read(path, sampling=sampling) for sampling in ("one-fps-uniform", "segment-centers", "tail")}
    stop_clock(path)
    for sampling, expected in timed.items():
        clip = read(path, sampling=sampling)
        assert torch.equal(clip.pixels, expected.pixels)
        torch.testing.assert_close(clip.timestamps, expected.timestamps)
    info = probe(path)
    assert (info.timed, info.frames, info.fps, info.duration) == (False, 60, 10.0, clip.duration)


def test_frames_with_equal_timestamps_are_selected_after_decoding(tmp_path):
    stamps = [100 * n for n in range(10)] + [1000 + 50 * n for n in range(20)]
    path = stop_clock(write_video(tmp_path / "clip.mp4", 30, stamps=stamps, options={"bf": "0"}), only_first=True)
    clip = read(path, 4, sampling="segment-centers")
    assert numbers_of(clip.pixels) == [12, 17, 23, 28]
    torch.testing.assert_close(clip.timestamps, (torch.tensor([12, 17, 23, 28]) - 10) / 20)


@pytest.mark.parametrize(
    ("name", "codec", "start", "container_options"),
    [("a.mp4", "libx264", 0, FASTSTART), ("b.mp4", "libx264", 0, {"movflags": "frag_keyframe+empty_moov"}),
     ("a.avi", "libx264", 0, {}), ("a.mkv", "libx264", 0, {}), ("b.mkv", "libx264", 500, {}),
     ("a.webm", "libvpx", 5000, {})],
)  # fmt: skip
def test_a_truncated_file_is_an_error_after_its_end(tmp_path, name, codec, start, container_options):
    stamps = [start + 100 * number for number in range(100)] if start else None  # matroska files may start late
    path = write_video(
        tmp_path / name, 100, codec=codec, stamps=stamps, container_options=container_options, options=SHORT_GROUPS
    )
    assert numbers_of(read(path, 10).pixels) == list(range(0, 100, 10))
    info = probe(path)
    assert (info.broken, info.duration) == (None, pytest.approx(10.0, abs=0.11))
    cut_off(path, 0.6)
    for read_whole in (read, lambda path: [*frames_at_rate(path, 1, np.asarray)]):
        with pytest.raises(VideoError, match=rf"{name}: ends early at \d\.\d\d s"):
            read_whole(path)
    assert numbers_of(read(path, 2, span=(1.0, 3.0)).pixels) == [10, 20], "the part before is intact"
    assert probe(path).broken is not None


def test_damaged_frames_are_not_concealed(tmp_path):
    path = write_video(tmp_path / "clip.mp4", 100, options={"g": "20", "crf": "10"}, container_options=FASTSTART)
    scramble(path, 0.5, 0.6)
    with pytest.raises(VideoError, match=r"clip\.mp4: cannot be decoded past \d\.\d+ s"):
        read(path, 10)
    assert numbers_of(read(path, 2, span=(0.0, 2.0)).pixels) == [0, 10], "other segments can be decoded"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("not a video\n" * 50), "cannot be opened as video"),
        (lambda path: cut_off(write_video(path, 60), 0.5), "cannot be opened as video"),  # without its index
        (write_sound, "has no video stream, only audio"),
        (write_song, "has no video stream, only audio"),
        (lambda path: rename_codec(write_video(path, 5)), "its video codec is unknown"),
        (lambda path: None, "there is no such file"),
        (lambda path: scramble(write_video(path, 60, container_options=FASTSTART), 0.0, 1.0), "cannot be decoded"),
    ],
)
def test_files_without_a_readable_video_are_named(tmp_path, make, reason):
    path = tmp_path / "thing.mp4"
    make(path)
    for function in (read, probe):
        with pytest.raises(VideoError, match=f"thing.mp4: .*{reason}") as raised:
            function(path)
        error = pickle.loads(pickle.dumps(raised.value))  # as it survives a worker process
        assert (str(error), error.path, error.reason) == (str(raised.value), path, raised.value.reason)


def test_real_clips_equal_decoding_everything(test_data, monkeypatch):
    clips, opened, open_file = test_data / "clips" / "videos", [], av.open
    monkeypatch.setattr(av, "open", lambda *given, **options: opened.append(given) or open_file(*given, **options))
    for path in [
        *sorted(clips.glob("vgg_*"))[-2:-1],
        *sorted((test_data / "annotations" / "msrvtt" / "videos").iterdir())[::8],
        clips / "pllava_cooking.mp4",  # starts with frames that are not displayed
        clips / "mmaction_test.avi",  # two frames in a packet, which are decoded once
    ]:
        opened.clear()
        clip = read(path, 5, sampling="segment-centers")
        assert path.suffix != ".avi" or len(opened) == 1
        assert_decoded(path, clip)


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuvj420p", "yuv422p"])
def test_converted_images_equal_those_of_pyav_at_every_width(pixel_format, tmp_path):
    random, to_image = np.random.default_rng(0), partial(upright_image, tmp_path, VideoReformatter())
    for width in range(16, 1301, 3):  # in steps of 3, since a row is converted in blocks of powers of two
        frame = av.VideoFrame(width, 14, pixel_format)
        for plane in frame.planes:
            plane.update(random.integers(0, 256, plane.buffer_size, dtype=np.uint8).tobytes())
        freed = [np.full(4 * width * 14, value, dtype=np.uint8) for value in (0x55, 0xAA) for _ in range(4)]
        del freed  # so that bytes that are never written differ
        np.testing.assert_array_equal(np.asarray(to_image(frame)), np.asarray(frame.to_image()), str(width))
