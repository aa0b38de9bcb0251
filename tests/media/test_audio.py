"""Waveforms of audio tracks in any format, with gaps and errors."""

import csv
import itertools

import librosa
import numpy as np
import pytest
from sound_files import burst, tone, write_clip

from tvr_lightning.media.audio import SAMPLE_RATE, STEPS_PER_SECOND, read_audio
from tvr_lightning.media.container import MediaError


def loudness(waveform, start, stop):
    """Root mean square between two times in seconds."""
    return float(np.sqrt(np.mean(np.square(waveform[round(start * SAMPLE_RATE) : round(stop * SAMPLE_RATE)]))))


def test_16_khz_is_read_exactly_and_other_rates_are_resampled_as_librosa_does(tmp_path):
    sound = tone(2.0)
    track = read_audio(write_clip(tmp_path / "plain.mkv", sound))
    assert track.waveform.shape == (32_000,)
    assert np.abs(track.waveform - sound[0]).max() < 2 / 2**15
    assert (track.present, track.problem) == (True, None)
    assert track.heard.all()
    sound = tone(2.0, 44_100, 1000.0)
    track = read_audio(write_clip(tmp_path / "cd.mkv", sound, 44_100))
    quantized = np.round(sound[0] * 2**15) / np.float32(2**15)
    expected = librosa.resample(quantized, orig_sr=44_100, target_sr=16_000, res_type="soxr_hq")
    assert np.abs(track.waveform - expected[:32_000]).max() < 1e-4


STEREO = tone(2.0, 48_000, channels=2)
SURROUND = np.concatenate([tone(2.0, 96_000), np.zeros((5, 192_000), np.float32)])


@pytest.mark.parametrize(
    ("name", "sound", "options", "heard", "level"),
    [
        *((f"{codec}.{suffix}", burst(3.0, 1.0, 2.0, 48_000), {"rate": 48_000, "seconds": 3.0, "codec": codec}, (1, 2),
           1) for suffix, codec in (("mp4", "aac"), ("mkv", "mp3"), ("mkv", "flac"), ("mkv", "libopus"))),
        ("eight-bits.avi", tone(2.0, 8000), {"rate": 8000, "codec": "pcm_u8"}, (0, 2), 1),
        ("surround.mkv", SURROUND, {"rate": 96_000, "layout": "5.1"}, (0, 2), 1 / 6),  # the mean of its channels
        ("stereo.mp4", STEREO, {"rate": 48_000, "layout": "stereo", "codec": "aac"}, (0, 2), 1),
        ("late.mkv", tone(1.0), {"seconds": 3.0, "sound_start": 1.5}, (1.5, 2.5), 1),
        ("short.mkv", tone(1.0), {"seconds": 3.0}, (0, 1), 1),
        ("long.mp4", tone(5.0), {"codec": "aac"}, (0, 2), 1),  # is cut to the length of the video
        ("late-video.mkv", burst(4.0, 2.0, 3.0), {"seconds": 3.0, "picture_start": 1.0}, (1, 2), 1),
    ],
)  # fmt: skip
def test_audio_of_any_format_is_aligned_with_the_video(tmp_path, name, sound, options, heard, level):
    seconds, (start, stop) = options.get("seconds", 2.0), heard
    track = read_audio(write_clip(tmp_path / name, sound, **options), span=(0.0, seconds))
    assert (len(track.waveform), track.problem) == (round(seconds * SAMPLE_RATE), None)
    assert loudness(track.waveform, start + 0.1, stop - 0.1) == pytest.approx(level * 0.5 / np.sqrt(2), rel=0.1)
    spectrum = np.abs(np.fft.rfft(track.waveform, 10 * SAMPLE_RATE))  # a bin per 0.1 Hz
    assert np.argmax(spectrum) / 10 == pytest.approx(440, abs=1)
    assert abs(float(track.waveform.mean())) < 0.01, "the offset of unsigned samples is removed"
    for quiet in ((0.0, start - 0.1), (stop + 0.1, seconds)):
        assert quiet[0] >= quiet[1] or loudness(track.waveform, *quiet) < 0.02
    steps = np.flatnonzero(track.heard) / STEPS_PER_SECOND
    if name in ("late.mkv", "short.mkv"):
        assert (steps.min(), steps.max()) == pytest.approx((start, stop), abs=0.05)
    else:
        assert track.heard.all() or name == "late-video.mkv"


def test_clips_without_a_readable_track_are_silent(tmp_path):
    for sound, present in ((None, False), (0 * tone(2.0), True)):
        track = read_audio(write_clip(tmp_path / "silent.mp4", sound, codec="aac"), on_corrupt="error")
        assert (track.present, track.problem, track.waveform.shape) == (present, None, (32_000,))
        assert not track.waveform.any()
    path = write_clip(tmp_path / "garbage.mkv", tone(2.0), codec="flac", spoil=lambda n: True)
    track = read_audio(path)
    assert (track.present, track.waveform.any()) == (False, False)
    assert "failures" in str(track.problem)
    with pytest.raises(MediaError, match=r"garbage\.mkv"):
        read_audio(path, on_corrupt="error")


def test_a_span_is_a_part_of_the_whole_track(tmp_path):
    sound = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 16_000 * 12)).astype(np.float32)
    path = write_clip(tmp_path / "spans.mkv", sound, seconds=12.0)
    whole = read_audio(path).waveform
    for start, end in itertools.pairwise((0.0, 2.5, 7.3, 11.0)):
        part = read_audio(path, span=(start, end)).waveform
        assert np.array_equal(part, whole[round(start * 16_000) : round(start * 16_000) + len(part)])
        assert len(part) == round((end - start) * 16_000)


def test_a_codec_error_affects_only_its_own_samples(tmp_path):
    path = write_clip(tmp_path / "damaged.mkv", tone(4.0), seconds=4.0, codec="aac", spoil=lambda n: 30 <= n < 40)
    track = read_audio(path, span=(0.0, 4.0))
    gap = np.flatnonzero(~track.heard) / 50
    assert 1.8 < gap.min() < gap.max() < 2.6
    for start, stop in ((0.1, 1.7), (2.7, 3.9)):
        assert loudness(track.waveform, start, stop) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    assert not track.waveform[round(2.0 * SAMPLE_RATE) : round(2.3 * SAMPLE_RATE)].any()
    with pytest.raises(MediaError, match=r"damaged\.mkv: audio track: 10 failures, first: packet at 1\.\d\d s"):
        read_audio(path, span=(0.0, 4.0), on_corrupt="error")


def test_invalid_samples_become_zeros_and_are_counted(tmp_path):
    sound = tone(2.0)
    sound[0, 1000:1100], sound[0, 2000], sound[0, 3000] = np.nan, np.inf, 1e30
    path = write_clip(tmp_path / "nan.mkv", sound, codec="pcm_f32le")
    track = read_audio(path)
    assert np.isfinite(track.waveform).all()
    assert "102 samples are NaN, infinite or out of range" in str(track.problem)
    with pytest.raises(MediaError, match="102 samples"):
        read_audio(path, on_corrupt="error")


def test_real_clips_have_the_listed_audio(test_data):
    with (test_data / "clips" / "captions.csv").open(encoding="utf-8") as file:
        listed = {row["file"]: row["has_audio"] == "True" for row in csv.DictReader(file)}
    tracks = {name: read_audio(test_data / "clips" / name, on_corrupt="error") for name in listed}
    assert {name: track.present for name, track in tracks.items()} == listed
    assert all(np.isfinite(track.waveform).all() for track in tracks.values())
