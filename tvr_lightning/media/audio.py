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
from typing import Literal, cast

import av
import numpy as np

from tvr_lightning.media.container import (
    MediaError,
    TimeBudget,
    VideoError,
    check_packets,
    open_media,
    packets_of,
    words_of,
)

SAMPLE_RATE = 16_000
STEP_SAMPLES = 320
STEPS_PER_SECOND = SAMPLE_RATE // STEP_SAMPLES

_JITTER_SECONDS = 0.05  # containers round timestamps to 1 ms or more; larger steps are real gaps
_MAX_SAMPLES = 2**30  # six hours at 48 kHz
_LOUDEST_SAMPLE = 1000.0  # times full scale; float tracks overshoot slightly, invalid data by orders of magnitude
_FULL_SCALE = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "s64": 2.0**63, "flt": 1.0, "dbl": 1.0}


Piece = tuple[int, np.ndarray]
"""Position of the first sample in the clip, and samples (T,)."""


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
    path, budget = Path(path), TimeBudget(Path(path))
    failures: list[str] = []
    problems: list[str] = []
    pieces: list[Piece] = []
    rate = SAMPLE_RATE
    try:
        with open_media(path) as container:
            origin, length = _bounds(container, duration, span)
            _check_samples((length or 0.0) * SAMPLE_RATE, path)
            stream = container.streams.best("audio")
            if isinstance(stream, av.AudioStream) and not stream.rate:
                problems.append("has no sample rate")
            elif isinstance(stream, av.AudioStream):
                rate = stream.rate
                _check_samples((length or 0.0) * rate, path)
                if span and origin > 1.0 and stream.time_base:
                    container.seek(int((origin - 1.0) / stream.time_base), stream=stream)
                end = None if length is None else origin + length
                pieces = list(_decode(container, stream, origin, end, failures, budget))
                if not pieces and not failures and not span:
                    problems.append("has no samples")
        if length is None:
            length = max(pieces[-1][0] + len(pieces[-1][1]), 0) / rate if pieces else 0.0
            _check_samples(length * max(rate, SAMPLE_RATE), path)
    except VideoError as error:
        raise AudioError(path, error.reason) from error
    except av.FFmpegError as error:
        raise AudioError(path, f"its audio cannot be read ({words_of(error)})") from error
    native, segments, invalid = _place(pieces, length, rate)
    if failures:
        problems.append(f"{len(failures)} failures, first: {failures[0]}")
    if invalid:
        problems.append(f"{invalid} samples are NaN, infinite or out of range")
    problem = "; ".join(problems) or None
    if problem and on_corrupt == "error":
        raise AudioError(path, f"audio track: {problem}")
    samples = round(length * SAMPLE_RATE)
    heard = np.zeros(math.ceil(samples / STEP_SAMPLES), dtype=bool)
    for start, stop in segments:
        heard[start * STEPS_PER_SECOND // rate : -(-stop * STEPS_PER_SECOND // rate)] = True
    native = native[: max((stop for _, stop in segments), default=0) + rate]  # the filter ends within a second
    return AudioTrack(_resample(native, rate, samples), SAMPLE_RATE, heard, problem)


def _bounds(
    container: av.container.InputContainer, duration: float | None, span: tuple[float, float] | None
) -> tuple[float, float | None]:
    """Return the start of a clip in the time of its file, and its duration if it is known without decoding."""
    origin = span[0] if span else 0.0
    length = container.duration / av.time_base if container.streams.video and container.duration else None
    if container.streams.video:
        video = container.streams.video[0]
        if video.time_base:  # time 0 of the clip is the start of the video
            origin += float((video.start_time or 0) * video.time_base)
            length = float(video.duration * video.time_base) if video.duration else length
    if span:
        length = span[1] - span[0]
    if duration is not None:
        length = duration
    return origin, None if length is None else max(length, 0.0)  # the header of a damaged file can be negative


def _check_samples(count: float, path: Path) -> None:
    if count > _MAX_SAMPLES:
        found = f"its audio is {count:,.0f} samples long"
        raise VideoError(path, f"{found}; the maximum is {_MAX_SAMPLES:,}, six hours at 48 kHz")


def _decode(
    container: av.container.InputContainer,
    stream: av.AudioStream,
    origin: float,
    end: float | None,
    failures: list[str],
    budget: TimeBudget,
) -> Iterator[Piece]:
    """Decode packet by packet, so that a damaged packet affects no other samples, and append errors to `failures`."""
    packets, rate = packets_of(container, stream), stream.rate
    cursor: int | None = None
    count = 0
    for number in itertools.count(1):
        budget.check()
        check_packets(number, budget.path)
        try:
            packet = next(packets, None)
        except av.FFmpegError as error:
            failures.append(f"the file ends early: {words_of(error)}")
            return
        if packet is None:
            return
        moment = None if packet.pts is None else float(packet.pts * (packet.time_base or Fraction(1)))
        if end is not None and moment is not None and moment > end + 1.0:
            return
        try:
            frames = cast(list[av.AudioFrame], packet.decode())
        except av.FFmpegError as error:
            where = "the last packet" if moment is None else f"packet at {moment:.2f} s"
            failures.append(f"{where}: {words_of(error)}")
            continue
        for frame in frames:
            if frame.sample_rate != rate:
                failures.append(f"the sample rate changes from {rate} to {frame.sample_rate}")
                return
            if frame.pts is not None and frame.time_base is not None:
                place = round((float(frame.pts * frame.time_base) - origin) * rate)
                if cursor is None or abs(place - cursor) > _JITTER_SECONDS * rate:
                    cursor = place
            samples = _mono(frame)
            yield cursor or 0, samples
            cursor = (cursor or 0) + len(samples)
            count += len(samples)
            _check_samples(count, budget.path)


def _mono(frame: av.AudioFrame) -> np.ndarray:
    """Return the mean of the channels, (T,) float32, full scale = 1."""
    name = frame.format.name
    array = frame.to_ndarray()
    if not name.endswith("p"):
        array = array.reshape(-1, frame.layout.nb_channels).T
    kind = name.removesuffix("p")
    values = array.astype(np.float64) / _FULL_SCALE[kind] - (1.0 if kind == "u8" else 0.0)
    return values.mean(axis=0).astype(np.float32)


def _place(pieces: list[Piece], length: float, rate: int) -> tuple[np.ndarray, list[tuple[int, int]], int]:
    """Copy the pieces into an array of (length * rate,) zeros; gaps take no memory, since a file may declare hours.

    Returns:
        Samples, with zeros instead of invalid ones; start and end of each decoded segment; number of invalid samples.
    """
    native = np.zeros(round(length * rate), dtype=np.float32)
    segments, invalid = [], 0
    for place, samples in pieces:
        start, end = max(place, 0), min(place + len(samples), len(native))
        if start < end:
            inside = samples[start - place : end - place]
            valid = np.isfinite(inside) & (np.abs(inside) <= _LOUDEST_SAMPLE)
            invalid += int((~valid).sum())
            native[start:end] = np.where(valid, inside, np.float32(0.0))
            segments.append((start, end))
    return native, segments, invalid


def _resample(native: np.ndarray, rate: int, samples: int) -> np.ndarray:
    """Return the samples at 16 kHz, (samples,) float32."""
    import librosa  # librosa loads its modules lazily, yet this takes a second that readers without audio save

    if native.any() and rate != SAMPLE_RATE:
        native = librosa.resample(native, orig_sr=rate, target_sr=SAMPLE_RATE, res_type="soxr_hq")
    waveform = np.zeros(samples, dtype=np.float32)  # which takes no memory after the last decoded sample
    waveform[: len(native)] = native[:samples]
    return waveform
