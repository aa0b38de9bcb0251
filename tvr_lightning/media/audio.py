"""The audio of a clip as 16 kHz mono, synchronized with the video.

Time is counted in steps of 20 ms, because Whisper and wav2vec 2.0 both return one vector per 20 ms of audio.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import numpy as np

from tvr_lightning.media.container import MediaError, TimeBudget, VideoError, open_media, packets_of, words_of
from tvr_lightning.media.packets import check_packets

SAMPLE_RATE = 16_000
STEP_SAMPLES = 320
STEPS_PER_SECOND = SAMPLE_RATE // STEP_SAMPLES

_JITTER_SECONDS = 0.05  # containers round timestamps to 1 ms or more; larger steps are real gaps
_MAX_SAMPLES = 2**30  # six hours at 48 kHz
_LOUDEST_SAMPLE = 1000.0  # times full scale; float tracks overshoot slightly, invalid data by orders of magnitude
_FULL_SCALE = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "s64": 2.0**63, "flt": 1.0, "dbl": 1.0}


class AudioError(MediaError):
    """A file whose audio track is damaged."""


@dataclass
class AudioTrack:
    """The audio of one clip, synchronized with the video: sample 0 is at the start of the clip.

    Attributes:
        waveform: Samples (T,) float32, mono, zero if nothing was decoded. T is the clip's duration times `rate`.
        rate: Samples per second.
        heard: Mask (S,) bool, True for 20 ms steps with decoded samples. S = ceil(T / (rate / 50)).
        problem: Description of the damage, or None. A clip without an audio track has no problem.
    """

    waveform: np.ndarray
    rate: int
    heard: np.ndarray
    problem: str | None = None

    @property
    def present(self) -> bool:
        """True if any audio was decoded."""
        return bool(self.heard.any())


def read_audio(
    path: str | Path,
    *,
    duration: float | None = None,
    span: tuple[float, float] | None = None,
    on_corrupt: Literal["zeros", "error"] = "zeros",
) -> AudioTrack:
    """Read a clip's audio as 16 kHz mono, synchronized with the video.

    PyAV decodes the best audio stream, its channels are averaged (as in the released GAID code), and librosa resamples
    with soxr. Audio outside the clip is dropped, and missing audio is filled with zeros; `present` is False if there is
    none. The duration is by default that of the span, the video, the container, or the audio, in this order. In a
    damaged track, `zeros` keeps the decoded samples and describes the damage in `problem`.

    Raises:
        AudioError: The file cannot be opened, takes too long, or is too large; or a track is damaged (`error`).
    """
    path = Path(path)
    try:
        with open_media(path) as container:
            pieces, length, rate, problem = _decode(container, duration, span, TimeBudget(path))
    except VideoError as error:
        raise AudioError(path, error.reason) from error
    except av.FFmpegError as error:
        raise AudioError(path, f"its audio cannot be read ({words_of(error)})") from error
    native, stretches, bad = _place(pieces, length, rate)
    if bad:
        problem = "; ".join(p for p in (problem, f"{bad} samples are NaN, infinite or out of range") if p)
    if problem and on_corrupt == "error":
        raise AudioError(path, f"audio track: {problem}")
    samples = round(length * SAMPLE_RATE)
    return AudioTrack(
        _resample(native, stretches, rate, samples), SAMPLE_RATE, _heard(stretches, rate, samples), problem
    )


Pieces = list[tuple[int, np.ndarray]]


def _decode(
    container: av.container.InputContainer,
    duration: float | None,
    span: tuple[float, float] | None,
    budget: TimeBudget,
) -> tuple[Pieces, float, int, str | None]:
    """Decode the best audio stream: pieces (first sample in the clip, samples), clip duration, rate, problem."""
    origin = _video_start(container) + (span[0] if span else 0.0)
    known = duration if duration is not None else (span[1] - span[0] if span else _video_duration(container))
    stream = container.streams.best("audio")
    known = None if known is None else max(known, 0.0)  # the header of a damaged file can declare a negative duration
    _check_samples((known or 0.0) * SAMPLE_RATE, budget.path)
    if not isinstance(stream, av.AudioStream):
        return [], known or 0.0, SAMPLE_RATE, None
    rate = stream.rate
    if not rate:
        return [], known or 0.0, SAMPLE_RATE, "has no sample rate"
    _check_samples((known or 0.0) * rate, budget.path)
    if span and origin > 1.0 and stream.time_base:
        container.seek(int((origin - 1.0) / stream.time_base), stream=stream)
    pieces: Pieces = []
    failures: list[str] = []
    cursor: int | None = None
    count = 0
    for frame in _frames(container, stream, None if known is None else origin + known, failures, budget):
        if frame.sample_rate != rate:
            failures.append(f"the sample rate changes from {rate} to {frame.sample_rate}")
            break
        samples = _mono(frame)
        if frame.pts is not None and frame.time_base is not None:
            place = round((float(frame.pts * frame.time_base) - origin) * rate)
            if cursor is None or abs(place - cursor) > _JITTER_SECONDS * rate:
                cursor = place
        cursor = cursor or 0
        pieces.append((cursor, samples))
        cursor += len(samples)
        count += len(samples)
        _check_samples(count, budget.path)
    length = known if known is not None else max((cursor or 0) / rate, 0.0)
    _check_samples(length * max(rate, SAMPLE_RATE), budget.path)
    problem = f"{len(failures)} failures, first: {failures[0]}" if failures else None
    if not pieces and not failures and not span:
        problem = "has no samples"
    return pieces, length, rate, problem


def _check_samples(count: float, path: Path) -> None:
    if count > _MAX_SAMPLES:
        found = f"its audio is {count:,.0f} samples long"
        raise VideoError(path, f"{found}; the maximum is {_MAX_SAMPLES:,}, six hours at 48 kHz")


def _frames(
    container: av.container.InputContainer,
    stream: av.AudioStream,
    end: float | None,
    failures: list[str],
    budget: TimeBudget,
) -> Iterator[av.AudioFrame]:
    """Decode packet by packet, so that a damaged packet affects no other samples. Errors are appended to `failures`."""
    packets = packets_of(container, stream)
    for number in itertools.count(1):
        budget.check()
        check_packets(number, budget.path)
        try:
            packet = next(packets, None)
        except av.error.FFmpegError as error:
            failures.append(f"the file ends early: {words_of(error)}")
            return
        if packet is None:
            return
        moment = None if packet.pts is None else float(packet.pts * (packet.time_base or Fraction(1)))
        if end is not None and moment is not None and moment > end + 1.0:
            return
        try:
            frames = packet.decode()
        except av.error.FFmpegError as error:
            where = "the last packet" if moment is None else f"packet at {moment:.2f} s"
            failures.append(f"{where}: {words_of(error)}")
            continue
        for frame in frames:
            if isinstance(frame, av.AudioFrame):
                yield frame


def _video_start(container: av.container.InputContainer) -> float:
    """Return the start time of the video in the file, in seconds, which is time 0 of the clip."""
    if container.streams.video:
        stream = container.streams.video[0]
        if stream.start_time is not None and stream.time_base:
            return float(stream.start_time * stream.time_base)
    return 0.0


def _video_duration(container: av.container.InputContainer) -> float | None:
    if not container.streams.video:
        return None
    stream = container.streams.video[0]
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration else None


def _mono(frame: av.AudioFrame) -> np.ndarray:
    """Return the mean of the channels, (T,) float32, full scale = 1."""
    name = frame.format.name
    array = frame.to_ndarray()
    if not name.endswith("p"):
        array = array.reshape(-1, frame.layout.nb_channels).T
    kind = name.removesuffix("p")
    values = array.astype(np.float64) / _FULL_SCALE[kind] - (1.0 if kind == "u8" else 0.0)
    return values.mean(axis=0).astype(np.float32)


def _place(pieces: Pieces, length: float, rate: int) -> tuple[np.ndarray, list[tuple[int, int]], int]:
    """Copy the pieces into an array of (length * rate,) zeros.

    The gaps between them are not written and take no memory: a file may declare hours of audio without containing them.

    Returns:
        The samples, with zeros instead of invalid ones; start and end of each decoded segment; the number of invalid
        samples.
    """
    native = np.zeros(max(round(length * rate), 0), dtype=np.float32)
    stretches, bad = [], 0
    for place, samples in pieces:
        start, end = max(place, 0), min(place + len(samples), len(native))
        if start < end:
            inside = samples[start - place : end - place]
            sound = np.isfinite(inside) & (np.abs(inside) <= _LOUDEST_SAMPLE)
            bad += len(sound) - int(sound.sum())
            native[start:end] = np.where(sound, inside, np.float32(0.0))
            stretches.append((start, end))
    return native, stretches, bad


def _resample(native: np.ndarray, stretches: list[tuple[int, int]], rate: int, samples: int) -> np.ndarray:
    """Return the samples at 16 kHz, (samples,) float32."""
    import librosa  # librosa loads its modules lazily, yet this takes a second that readers without audio save

    waveform = np.zeros(samples, dtype=np.float32)
    ends = [end for _, end in stretches]
    native = native[: max(ends, default=0) + rate]  # the resampling filter of the last samples ends within a second
    if not native.any():
        return waveform
    if rate != SAMPLE_RATE:
        native = librosa.resample(native, orig_sr=rate, target_sr=SAMPLE_RATE, res_type="soxr_hq")
    kept = min(samples, len(native))
    waveform[:kept] = native[:kept]
    return waveform


def _heard(stretches: list[tuple[int, int]], rate: int, samples: int) -> np.ndarray:
    """Return the mask (S,), bool, of the 20 ms steps in which at least one sample was decoded."""
    heard = np.zeros(math.ceil(samples / STEP_SAMPLES), dtype=bool)
    for start, end in stretches:
        heard[start * STEPS_PER_SECOND // rate : -(-end * STEPS_PER_SECOND // rate)] = True
    return heard
