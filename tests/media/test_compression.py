"""Compressed copies have the times, frames, audio and crops of the original."""

from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from broken_videos import cut_off, numbers_of, write_sound, write_video
from PIL import Image
from sound_files import tone, write_clip

from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.augment import CropFlip
from tvr_lightning.media.clip4clip_copies import clip4clip_size, constant_rate_frames
from tvr_lightning.media.compression import Compression, Copy, compress, verify_copy
from tvr_lightning.media.container import VideoError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import frames_at_rate, probe, read_clip


def decibels(one: torch.Tensor, other: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of two clips (F, 3, S, S)."""
    error = (one.double() - other.double()).square().mean()
    return float(10 * torch.log10(255**2 / error))


def moving(number: int, width: int, height: int) -> np.ndarray:
    """(height, width, 3) uint8: a bright bar that moves over a gradient."""
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.stack([rows % 256, (columns + 2 * number) % 256, 128 + 0 * rows], axis=-1).astype(np.uint8)
    image[:, 4 * number : 4 * number + 20] = (250, 240, 20)
    return image


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A wide clip of 12.5 frames a second, 7.2 s long, with a tone."""
    path = tmp_path_factory.mktemp("original") / "wide.mp4"
    options = {"crf": "8", "bf": "0"}
    return write_video(
        path, 90, rate=Fraction(25, 2), size=(374, 250), picture=moving, options=options, sound=7.2, sound_rate=44_100
    )


def write_copy(source, how, path):
    made = compress(source, how)
    path.write_bytes(made.content)
    verify_copy(path, made)
    return path, made


@pytest.fixture(scope="module")
def copied(original, tmp_path_factory):
    return write_copy(original, Compression(fps=3, size=112), tmp_path_factory.mktemp("copy") / "wide.mp4")


@pytest.mark.parametrize("span", [None, (2.0, 5.5)])
def test_a_copy_has_the_frames_and_the_audio_of_the_original(original, copied, span):
    path, made = copied
    assert (made.frames, made.notes) == (22, [])
    for sampling in ("one-fps-uniform", "head", "segment-centers"):
        found, expected = (
            read_clip(file, frames=6, prepare=Preparation(112), sampling=sampling, span=span)
            for file in (path, original)
        )
        assert found.duration == pytest.approx(expected.duration, abs=1e-3)
        assert torch.equal(found.frame_mask, expected.frame_mask)
        if sampling == "segment-centers":  # which counts frames, of which there are fewer
            assert (found.timestamps - expected.timestamps).abs().max() < 0.5
        else:
            assert decibels(found.pixels, expected.pixels) > 30
    found, expected = (read_audio(file, span=span or (0.0, 7.2)) for file in (path, original))
    assert made.sound > 300
    assert np.corrcoef(found.waveform, expected.waveform)[0, 1] > 0.999
    assert np.array_equal(found.heard, expected.heard)


def test_crops_of_a_copy_cover_the_original(original, copied):
    path, _ = copied
    info = probe(path)
    assert (info.width, info.height) == (168, 112)  # of 374 x 250, uncropped
    generator = np.random.default_rng(0)
    for _ in range(3):
        crop = CropFlip(112, tuple(map(tuple, generator.random((10, 4)))), bool(generator.random() < 0.5))
        boxes = [np.array(crop.box(*size)) / [*size, *size] for size in ((168, 112), (374, 250))]
        assert np.abs(boxes[0] - boxes[1]).max() < 0.01
        found, expected = (read_clip(file, frames=6, prepare=crop) for file in (path, original))
        assert decibels(found.pixels, expected.pixels) > 20


@pytest.mark.parametrize("size", [(299, 224), (297, 224), (301, 224), (303, 226), (224, 299), (224, 297)])
def test_the_center_crop_of_frames_of_odd_size_does_not_move(size):
    frame = Image.fromarray(np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    kept = Compression(size=min(size))(frame)
    assert kept.shape[0] % 2 == kept.shape[1] % 2 == 0
    preparation = Preparation(min(size))
    assert np.array_equal(preparation(Image.fromarray(kept)), preparation(frame))


def test_other_audio_is_converted_and_small_frames_keep_their_size(tmp_path):
    path = write_clip(tmp_path / "clip.mkv", tone(2.0, 22_050), 22_050)
    copy, made = write_copy(path, Compression(size=224), tmp_path / "copy.mp4")
    assert made.notes == ["its audio is converted to 16 kHz mono"]
    found, expected = (read_audio(file, span=(0.0, 1.9)) for file in (copy, path))
    assert np.corrcoef(found.waveform, expected.waveform)[0, 1] > 0.98
    assert (probe(copy).width, probe(copy).height) == (64, 64)


def test_a_truncated_file_has_no_copy_and_files_are_opened_once(original, tmp_path, monkeypatch):
    opened, open_av = [], av.open
    monkeypatch.setattr(av, "open", lambda *given, **options: opened.append(given) or open_av(*given, **options))
    assert len(list(frames_at_rate(original, 3, np.asarray))) > 20
    assert len(opened) == 1
    path = tmp_path / "cut.mp4"
    path.write_bytes(original.read_bytes())
    cut_off(path, 0.5)
    with pytest.raises(VideoError, match=r"cut\.mp4"):
        compress(path, Compression())


def test_a_copy_that_differs_from_what_was_written_is_an_error(copied, tmp_path):
    path, made = copied
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(made.content[: len(made.content) // 2])
    with pytest.raises(VideoError):
        verify_copy(cut, made)
    with pytest.raises(VideoError, match="was written with 23 frames"):
        verify_copy(path, Copy(b"", 23, made.duration, made.sound))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 8}, "size is 8"),
        *(({"like": "clip4clip", **other}, "like") for other in ({"fps": 4}, {"interpolation": "bilinear"})),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Compression(**options)


LIKE = Compression(like="clip4clip")
NTSC_FILM, NTSC = Fraction(24000, 1001), Fraction(30000, 1001)
VARIABLE = [0, 100, 200, 700, 800, 2200, 2300, 2340, 2380, 3500, 3900, 4000, 4600, 4700, 4800, 4900]
LATE = [900 + time for time in VARIABLE]


def frames_of(path) -> torch.Tensor:
    with av.open(str(path)) as container:
        return torch.stack([torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("10.mp4", {"rate": 10, "frames": 40}, [0, 1, 2, 6, 9, 12, 16, 19, 22, 26, 29, 32, 36, 39]),
        ("23.976.mp4", {"rate": NTSC_FILM, "frames": 90}, [0, 1, 7, 15, 23, 31, 39, 47, 55, 63, 71, 79, 87]),
        ("29.97.mp4", {"rate": NTSC, "frames": 110}, [0, 1, 8, 18, 28, 38, 48, 58, 68, 78, 88, 98, 108]),
        ("50.mp4", {"rate": 50, "frames": 160}, [0, 1, 14, 31, 48, 64, 81, 98, 114, 131, 148]),
        ("2.mp4", {"rate": 2, "frames": 9}, [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8]),
        ("variable.mp4", {"stamps": VARIABLE}, [0, 1, 2, 3, 4, 4, 5, 6, 6, 6, 6, 9, 10, 10, 10, 12, 15]),
        ("after-its-sound.mp4", {"stamps": LATE, "sound": 5.0},
         [0, 0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 6, 6, 6, 9, 10, 10, 10, 13, 15]),
        ("stamps-go-back.avi", {"rate": 25, "options": {"bf": "2"}}, [0, 1, 5, 13, 22, 30, 38, 47, 55]),
    ],
)  # fmt: skip
def test_constant_rate_frames_are_those_of_ffmpeg(tmp_path, name, options, expected):
    path = write_video(tmp_path / name, **{"frames": len(options.get("stamps", range(60))), **options})
    frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in constant_rate_frames(path, 3)]
    assert numbers_of(torch.stack(frames).permute(0, 3, 1, 2)) == expected


def test_copies_like_clip4clip_have_3_frames_per_second_and_audio(tmp_path):
    path = write_video(tmp_path / "small.mp4", 90, rate=25, sound=3.6)
    copy, made = write_copy(path, LIKE, tmp_path / "copy.mp4")
    frames = frames_of(copy)
    assert frames.shape == (12, 224, 224, 3)
    assert numbers_of(frames.permute(0, 3, 1, 2)) == [0, 1, 7, 15, 24, 32, 40, 49, 57, 65, 74, 82]
    assert (made.duration, made.notes) == (4.0, [])
    assert read_audio(copy).present
    turned = write_video(tmp_path / "turned.mp4", 20, size=(128, 96), rotation=90)
    assert frames_of(write_copy(turned, LIKE, copy)[0]).shape[1:3] == (168, 224), "as displayed"
    with pytest.raises(VideoError, match="has no video stream"):
        compress(write_sound(tmp_path / "sound.m4a"), LIKE)


@pytest.mark.parametrize(
    ("size", "expected"),  # of FFmpeg n9.0.2 with the filter of the script, which squashes portrait videos
    [((320, 240), (298, 224)), ((100, 30), (746, 224)), ((200, 200), (224, 224)), ((240, 320), (224, 168))],
)
def test_sizes_are_those_of_clip4clips_script(size, expected):
    assert clip4clip_size(*size) == expected
