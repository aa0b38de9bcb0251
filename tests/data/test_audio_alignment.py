"""Alignment of audio with frames, and the input of the audio encoders."""

from fractions import Fraction

import pytest
import torch
import whisper
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_files import burst, centers, given_to, noise, silent_track, tone, track_of, write_clip

from tvr_lightning.data.audio_alignment import AudioOptions, frame_cells, no_audio
from tvr_lightning.data.batch import AudioInput
from tvr_lightning.data.readers import MediaReader
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.audio import pool_steps
from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.preparation import Preparation

FRAMES = 12


@pytest.mark.parametrize("seconds", [1, 29, 30, 31, 60])
@pytest.mark.parametrize("frame", [0, 5, 11])
def test_duration_assigns_a_burst_to_its_frame(seconds, frame):
    start, stop = (frame + 0.1) * seconds / FRAMES, (frame + 0.9) * seconds / FRAMES
    given = given_to(track_of(burst(seconds, start, stop)), AudioOptions("whisper"), seconds)
    # Loudness per 20 ms stands for an encoder.
    power = (10 ** (given.values * 4 - 4)).sum(dim=2).reshape(1, -1, 2).sum(dim=-1)
    pooled = pool_steps(power[..., None], given.windows)[0, :, 0]
    first, second = pooled.topk(2).values
    assert int(pooled.argmax()) == frame
    assert second < 0.1 * first


@pytest.mark.parametrize("seconds", [1.0, 30.0, 47.0])
def test_duration_uses_whispers_log_mel_in_windows(seconds):
    sound = noise(seconds, seed=1)
    given = given_to(track_of(sound), AudioOptions("whisper"), seconds)
    assert given.values.shape == (1, 2, 80, 3000)
    expected = whisper.log_mel_spectrogram(whisper.pad_or_trim(sound, 2 * whisper.audio.N_SAMPLES))
    assert torch.equal(torch.cat([*given.values[0]], dim=1), expected)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.5, 90.0), st.integers(1, 24))
def test_frames_at_segment_centers_divide_the_whole_clip(seconds, frames):
    cells = frame_cells(*centers(seconds, frames), seconds)
    assert cells[0, 0] == 0
    assert float(cells[-1, 1]) == pytest.approx(seconds, rel=1e-5)
    assert torch.allclose(cells[1:, 0], cells[:-1, 1])
    assert torch.allclose(cells[:, 1] - cells[:, 0], torch.full((frames,), seconds / frames).double(), rtol=1e-4)


@pytest.mark.parametrize(
    ("moments", "duration", "cells"),
    [
        ([0.0, 1.0, 2.0, None], 2.8, [[0.0, 0.5], [0.5, 1.5], [1.5, 2.8], [0.0, 0.0]]),
        ([0.0, 1.0, 1.0], 2.0, [[0.0, 0.5], [0.5, 2.0], [0.5, 2.0]]),
    ],
)
def test_each_moment_belongs_to_the_nearest_frame(moments, duration, cells):
    mask = torch.tensor([moment is not None for moment in moments])
    found = frame_cells(torch.tensor([moment or 0.0 for moment in moments]), mask, duration)
    assert torch.allclose(found, torch.tensor(cells).double())


def test_frames_without_audio_are_masked(tmp_path):
    path = write_clip(tmp_path / "late.mkv", tone(2.0), seconds=6.0, sound_start=2.5)
    given = given_to(read_audio(path, span=(0.0, 6.0)), AudioOptions("whisper"), 6.0, frames=6)
    assert given.mask.tolist() == [[False, False, True, True, True, False]]
    starts, stops = given.windows[0, 2:5].T
    assert starts.tolist() == pytest.approx([125, 150, 200], abs=1)
    assert stops.tolist() == pytest.approx([150, 200, 225], abs=1)


def test_frames_after_the_maximum_length_are_masked_with_one_notice(caplog):
    options = AudioOptions("whisper", seconds=7.5)
    for _ in range(2):
        given = given_to(track_of(tone(15.0)), options, 15.0)
    assert given.mask.tolist() == [[True] * 6 + [False] * 6]
    assert len([record for record in caplog.records if "7.5 s" in record.message]) == 1


@pytest.mark.parametrize("kind", ["whisper", "wav2vec2"])
@pytest.mark.parametrize("align", ["duration", "clip30"])
def test_a_silent_clip_is_zero_and_masked(kind, align):
    given = given_to(silent_track(3.0), AudioOptions(kind, align), 3.0)
    assert not given.mask.any()
    assert not given.values.any()
    heard = given_to(track_of(tone(5.0)), AudioOptions(kind, align), 5.0)
    assert heard.mask.all()
    both = AudioInput.cat([given, heard, no_audio(AudioOptions(kind, align), FRAMES)])
    assert len(both) == 2
    assert both.mask.any(dim=1).tolist() == [False, True]


def test_a_span_has_its_own_part_of_the_audio(tmp_path):
    path = write_clip(tmp_path / "span.mkv", burst(9.0, 6.0, 7.0), seconds=9.0)
    read = MediaReader(3, Preparation(32), "one-fps-uniform", audio=AudioOptions("wav2vec2", seconds=5.0))
    media = read(VideoRecord("span", path, (5.0, 8.0)), None)
    loud = media.audio.values[0].abs()
    assert (media.audio.samples.tolist(), media.problems) == ([48_000], [])
    assert (media.audio.windows.shape, media.audio.mask.shape) == ((1, 3, 2), (1, 3))
    assert float(loud[16_000:32_000].mean()) > 0.2
    assert not loud[:15_900].any()
    assert not loud[32_100:].any()
    nothing, some = read.empty().tensors(), media.tensors()
    assert [(0, *t.shape[1:]) for t in some] == [t.shape for t in nothing]


def test_a_span_starts_with_the_frame_on_screen(tmp_path):
    path = write_clip(tmp_path / "slow.mkv", tone(20.0), seconds=20.0, fps=Fraction(1, 4))  # frames at 0, 4, 8, ... s
    read = MediaReader(3, Preparation(32), "segment-centers", audio=AudioOptions("whisper"))
    for span, windows in (
        ((7.0, 15.0), [[0, 25], [25, 150], [150, 400]]),
        ((3.0, 8.0), [[0, 25], [25, 250], [25, 250]]),
    ):
        assert read(VideoRecord("slow", path, span), None).audio.windows[0].tolist() == windows


def test_a_broken_track_is_an_error_or_reported(tmp_path):
    path = write_clip(tmp_path / "broken.mkv", tone(3.0), seconds=3.0, codec="aac", spoil=lambda n: 10 <= n < 15)
    record, settings = VideoRecord("broken", path), (3, Preparation(32), "one-fps-uniform")
    with pytest.raises(MediaError, match=r"broken\.mkv: audio track"):
        MediaReader(*settings, audio=AudioOptions("whisper"))(record, None)
    media = MediaReader(*settings, audio=AudioOptions("whisper"), on_corrupt="skip")(record, None)
    (problem,) = media.problems
    assert "broken.mkv: audio track: 5 failures" in problem
