"""Small copies: the clock, the pictures, the sound and the crops of the original."""

from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from broken_videos import cut_off, write_video
from PIL import Image
from sound_files import tone, write_clip

from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.augment import CropFlip
from tvr_lightning.media.compression import Compression, Copy, compress, verify_copy
from tvr_lightning.media.container import VideoError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.sampling import positions_at_rate
from tvr_lightning.media.video import frames_at_rate, probe, read_clip

KINDS = ("h264", "jpeg")


def decibels(one: torch.Tensor, other: torch.Tensor) -> float:
    """Peak signal over the difference of two clips (F, 3, S, S)."""
    error = (one.double() - other.double()).square().mean()
    return float(10 * torch.log10(255**2 / error))


def moving(number: int, width: int, height: int) -> np.ndarray:
    """(height, width, 3) uint8: a bright bar moves over a gradient."""
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


@pytest.fixture(scope="module", params=KINDS)
def copied(request, original, tmp_path_factory):
    how = Compression(fps=3, size=112, frames=request.param)
    made = compress(original, how)
    path = tmp_path_factory.mktemp("copy") / "wide.mp4"
    path.write_bytes(made.content)
    verify_copy(path, made)
    return path, made


def test_moments_are_those_of_the_frames_on_screen():
    times = np.array([0.0, 0.4, 0.8, 1.2, 1.6])
    assert positions_at_rate(times, 2.0, 2).tolist() == [0, 1, 2, 3]
    assert positions_at_rate(times, 2.1, 2).tolist() == [0, 1, 2, 3, 4]
    assert positions_at_rate(times, 0.0, 2).tolist() == [0]


@pytest.mark.parametrize("sampling", ["one-fps-uniform", "head", "segment-centres"])
@pytest.mark.parametrize("span", [None, (2.0, 5.5)])
def test_a_copy_shows_what_the_original_shows(original, copied, sampling, span):
    path, made = copied
    found = read_clip(path, frames=6, image_size=112, sampling=sampling, span=span)
    expected = read_clip(original, frames=6, image_size=112, sampling=sampling, span=span)
    assert (made.frames, made.notes) == (22, [])
    assert found.duration == pytest.approx(expected.duration, abs=1e-3)
    assert torch.equal(found.frame_mask, expected.frame_mask)
    if sampling == "segment-centres":  # which counts frames, of which there are fewer
        assert (found.timestamps - expected.timestamps).abs().max() < 0.5
    else:
        assert decibels(found.pixels, expected.pixels) > 30


def test_a_copy_sounds_as_the_original_at_the_same_moments(original, copied):
    path, made = copied
    found, expected = (read_audio(file, duration=7.2) for file in (path, original))
    assert made.sound > 300
    assert np.corrcoef(found.waveform, expected.waveform)[0, 1] > 0.999
    assert np.array_equal(found.heard, expected.heard)


def test_crops_of_augmentation_reach_every_edge_of_the_original(original, copied):
    path, _ = copied
    info = probe(path)
    assert (info.width, info.height) == (168, 112)  # 374 x 250, whole: nothing was cut off
    generator = np.random.default_rng(0)
    for _ in range(5):
        crop = CropFlip(112, tuple(map(tuple, generator.random((10, 4)))), bool(generator.random() < 0.5))
        boxes = [np.array(crop.box(*size)) / [*size, *size] for size in ((168, 112), (374, 250))]
        assert np.abs(boxes[0] - boxes[1]).max() < 0.01
        found, expected = (read_clip(file, frames=6, image_size=112, augment=crop) for file in (path, original))
        assert decibels(found.pixels, expected.pixels) > 20


@pytest.mark.parametrize("size", [(299, 224), (297, 224), (301, 224), (303, 226), (224, 299), (224, 297)])
def test_the_centre_square_of_a_frame_of_odd_size_stays_in_place(size):
    frame = Image.fromarray(np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    kept = Compression(size=min(size))(frame)
    assert kept.shape[0] % 2 == kept.shape[1] % 2 == 0
    preparation = Preparation(min(size))
    assert np.array_equal(preparation(Image.fromarray(kept)), preparation(frame))


def test_sound_that_mp4_cannot_hold_is_converted_and_small_frames_keep_their_size(tmp_path):
    path = write_clip(tmp_path / "clip.mkv", tone(2.0, 22_050), 22_050)
    made = compress(path, Compression(size=224))
    assert made.notes == ["its audio is converted to 16 kHz mono"]
    (tmp_path / "copy.mp4").write_bytes(made.content)
    verify_copy(tmp_path / "copy.mp4", made)
    found, expected = (read_audio(file, duration=1.9) for file in (tmp_path / "copy.mp4", path))
    assert np.corrcoef(found.waveform, expected.waveform)[0, 1] > 0.98
    assert (probe(tmp_path / "copy.mp4").width, probe(tmp_path / "copy.mp4").height) == (64, 64)


def test_a_file_is_opened_once_and_has_no_copy_if_it_breaks_off(original, tmp_path, monkeypatch):
    opened, open_av = [], av.open
    monkeypatch.setattr(av, "open", lambda *given, **options: opened.append(given) or open_av(*given, **options))
    assert len(list(frames_at_rate(original, 3, np.asarray))) > 20
    assert len(opened) == 1
    path = tmp_path / "cut.mp4"
    path.write_bytes(original.read_bytes())
    cut_off(path, 0.5)
    with pytest.raises(VideoError, match=r"cut\.mp4"):
        compress(path, Compression())


def test_a_copy_that_does_not_read_back_as_written_is_found(copied, tmp_path):
    path, made = copied
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(made.content[: len(made.content) // 2])
    with pytest.raises(VideoError):
        verify_copy(cut, made)
    with pytest.raises(VideoError, match="was written with 23 frames"):
        verify_copy(path, Copy(b"", 23, made.duration, made.sound))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"fps": 0}, "fps is 0"), ({"size": 8}, "size is 8"), ({"frames": "png"}, "must be one of h264, jpeg")],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Compression(**options)
