"""What a clip's sound is read as, however the track is stored or broken."""

import csv
import itertools

import librosa
import numpy as np
import pytest
from sound_files import burst, tone, write_clip

from tvr_lightning.media.audio import SAMPLE_RATE, STEPS_PER_SECOND, read_audio
from tvr_lightning.media.container import MediaError


def loudness(waveform, start, stop):
    """Root mean square between two seconds."""
    return float(np.sqrt(np.mean(np.square(waveform[round(start * SAMPLE_RATE) : round(stop * SAMPLE_RATE)]))))


def test_a_track_at_16_khz_comes_back_sample_by_sample(tmp_path):
    sound = tone(2.0)
    track = read_audio(write_clip(tmp_path / "plain.mkv", sound))
    assert track.waveform.shape == (32_000,)
    assert np.abs(track.waveform - sound[0]).max() < 2 / 2**15
    assert track.present
    assert bool(track.heard[0])
    assert track.heard.all()
    assert track.problem is None


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "aac"), ("m.mkv", "mp3"), ("f.mkv", "flac"), ("o.mkv", "libopus")]
)
def test_compressed_tracks_keep_the_burst_in_its_place(tmp_path, name, codec):
    path = write_clip(tmp_path / name, burst(3.0, 1.0, 2.0, 48_000), 48_000, seconds=3.0, codec=codec)
    track = read_audio(path, duration=3.0)
    assert len(track.waveform) == 48_000
    assert loudness(track.waveform, 1.1, 1.9) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)
    assert loudness(track.waveform, 0.0, 0.9) < 0.02
    assert loudness(track.waveform, 2.1, 2.9) < 0.02


def test_other_rates_are_resampled_as_librosa_does(tmp_path):
    sound = tone(2.0, 44_100, 1000.0)
    track = read_audio(write_clip(tmp_path / "cd.mkv", sound, 44_100))
    quantised = np.round(sound[0] * 2**15) / np.float32(2**15)
    expected = librosa.resample(quantised, orig_sr=44_100, target_sr=16_000, res_type="soxr_hq")
    assert np.abs(track.waveform - expected[:32_000]).max() < 1e-4


def test_eight_bit_mono_at_8_khz(tmp_path):
    track = read_audio(write_clip(tmp_path / "phone.avi", tone(2.0, 8_000), 8_000, codec="pcm_u8"))
    assert loudness(track.waveform, 0.2, 1.8) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    assert abs(float(track.waveform[3200:28800].mean())) < 0.01, "the offset of unsigned samples is taken off"
    assert track.problem is None


def test_surround_at_96_khz_is_averaged_over_its_channels(tmp_path):
    sound = tone(2.0, 96_000, channels=6)
    sound[1:] = 0.0
    track = read_audio(write_clip(tmp_path / "cinema.mkv", sound, 96_000, layout="5.1"))
    assert loudness(track.waveform, 0.2, 1.8) == pytest.approx(0.5 / np.sqrt(2) / 6, rel=0.05)
    assert track.waveform.shape == (32_000,)


def test_a_clip_without_a_track_is_silent_and_says_so(tmp_path):
    track = read_audio(write_clip(tmp_path / "silent.mp4", None), on_corrupt="error")
    assert not track.present
    assert track.problem is None
    assert track.waveform.shape == (32_000,)
    assert not track.waveform.any()


def test_a_silent_track_is_sound_all_the_same(tmp_path):
    track = read_audio(write_clip(tmp_path / "quiet.mkv", 0 * tone(2.0)))
    assert track.present
    assert track.problem is None
    assert not track.waveform.any()


def test_sound_shorter_than_the_picture_is_heard_while_it_lasts(tmp_path):
    track = read_audio(write_clip(tmp_path / "short.mkv", tone(1.0), seconds=3.0))
    assert len(track.waveform) == 48_000
    assert track.heard[:50].all()
    assert not track.heard[51:].any()
    assert not track.waveform[16_100:].any()


def test_sound_longer_than_the_picture_is_cut(tmp_path):
    track = read_audio(write_clip(tmp_path / "long.mp4", tone(5.0), seconds=2.0, codec="aac"))
    assert len(track.waveform) == 32_000
    assert track.heard.all()


def test_sound_that_starts_late_keeps_its_place(tmp_path):
    track = read_audio(write_clip(tmp_path / "late.mkv", tone(1.0), seconds=3.0, sound_start=1.5))
    assert track.heard.argmax() / STEPS_PER_SECOND == pytest.approx(1.5, abs=0.02)
    assert loudness(track.waveform, 0.0, 1.45) == 0.0
    assert loudness(track.waveform, 1.55, 2.45) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


def test_time_counts_from_the_first_picture(tmp_path):
    path = write_clip(tmp_path / "offset.mkv", burst(4.0, 2.0, 3.0), seconds=3.0, picture_start=1.0)
    track = read_audio(path)
    assert loudness(track.waveform, 1.05, 1.95) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    assert loudness(track.waveform, 0.0, 0.95) < 1e-3


def test_a_span_is_the_whole_track_cut(tmp_path):
    sound = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 16_000 * 12)).astype(np.float32)
    path = write_clip(tmp_path / "spans.mkv", sound, seconds=12.0)
    whole = read_audio(path).waveform
    for start, end in itertools.pairwise((0.0, 2.5, 7.3, 11.0)):
        part = read_audio(path, span=(start, end)).waveform
        assert np.array_equal(part, whole[round(start * 16_000) : round(start * 16_000) + len(part)])
        assert len(part) == round((end - start) * 16_000)


def test_a_codec_error_in_the_middle_costs_its_own_samples(tmp_path):
    path = write_clip(tmp_path / "damaged.mkv", tone(4.0), seconds=4.0, codec="aac", spoil=lambda n: 30 <= n < 40)
    track = read_audio(path, duration=4.0)
    gap = np.flatnonzero(~track.heard) / 50
    assert 1.8 < gap.min() < gap.max() < 2.6
    for start, stop in ((0.1, 1.7), (2.7, 3.9)):
        assert loudness(track.waveform, start, stop) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    assert not track.waveform[round(2.0 * SAMPLE_RATE) : round(2.3 * SAMPLE_RATE)].any()
    with pytest.raises(MediaError, match=r"damaged\.mkv: audio track: 10 failures, first: packet at 1\.\d\d s"):
        read_audio(path, duration=4.0, on_corrupt="error")


def test_a_track_that_never_decodes_is_absent_with_a_reason(tmp_path):
    path = write_clip(tmp_path / "garbage.mkv", tone(2.0), codec="flac", spoil=lambda n: True)
    track = read_audio(path)
    assert not track.present
    assert not track.waveform.any()
    assert "failures" in str(track.problem)
    with pytest.raises(MediaError, match=r"garbage\.mkv"):
        read_audio(path, on_corrupt="error")


def test_samples_that_are_no_numbers_become_zeros_and_are_counted(tmp_path):
    sound = tone(2.0)
    sound[0, 1000:1100] = np.nan
    sound[0, 2000] = np.inf
    sound[0, 3000] = 1e30
    path = write_clip(tmp_path / "nan.mkv", sound, codec="pcm_f32le")
    track = read_audio(path)
    assert np.isfinite(track.waveform).all()
    assert "102 samples are NaN, infinite or out of range" in str(track.problem)
    with pytest.raises(MediaError, match="102 samples"):
        read_audio(path, on_corrupt="error")


@pytest.mark.parametrize("content", [b"", b"this is a letter, not a film", bytes(5000)])
def test_what_is_no_media_file_is_named(tmp_path, content):
    path = tmp_path / "letter.mp4"
    path.write_bytes(content)
    with pytest.raises(MediaError, match=r"letter\.mp4: (cannot be opened|the file is empty)"):
        read_audio(path)


def test_real_clips_have_sound_where_their_list_says_so(test_data):
    with (test_data / "clips" / "captions.csv").open(encoding="utf-8") as file:
        listed = {row["file"]: row["has_audio"] == "True" for row in csv.DictReader(file)}
    tracks = {name: read_audio(test_data / "clips" / name, on_corrupt="error") for name in listed}
    assert {name: track.present for name, track in tracks.items()} == listed
    assert all(np.isfinite(track.waveform).all() for track in tracks.values())
