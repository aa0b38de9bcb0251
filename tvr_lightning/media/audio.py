"""The sound of a clip, read as 16 kHz mono on the picture's clock.

Time is counted in steps of 20 ms, because Whisper and wav2vec2 both give one vector per 20 ms of sound.
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

from tvr_lightning.media.opening import Allowance, MediaError, VideoError, open_media, packets_of, words_of
from tvr_lightning.media.packets import check_packets

SAMPLE_RATE = 16_000
STEP_SAMPLES = 320
STEPS_PER_SECOND = SAMPLE_RATE // STEP_SAMPLES

_JITTER_SECONDS = 0.05  # containers round time stamps to as little as 1 ms; larger steps are real gaps
_MAX_SAMPLES = 2**30  # six hours at 48 kHz
_LOUDEST_SAMPLE = 1000.0  # times full scale; float tracks overshoot a little, garbage by orders of magnitude
_FULL_SCALE = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "s64": 2.0**63, "flt": 1.0, "dbl": 1.0}


class AudioError(MediaError):
    """A sound track that is broken."""


@dataclass
class AudioTrack:
    """The sound of one clip on the picture's clock: sample 0 sounds when the clip begins.

    Attributes:
        waveform: (T,) float32, mono, zero where nothing was decoded; T is the clip's duration times `rate`.
        rate: samples per second.
        heard: (S,) bool, True for every step of 20 ms in which samples were decoded; S = ceil(T / (rate / 50)).
        problem: what was broken, or None. A clip without a track has no problem.
    """

    waveform: np.ndarray
    rate: int
    heard: np.ndarray
    problem: str | None = None

    @property
    def present(self) -> bool:
        """Whether any sound was decoded."""
        return bool(self.heard.any())


def read_audio(
    path: str | Path,
    *,
    duration: float | None = None,
    span: tuple[float, float] | None = None,
    on_corrupt: Literal["zeros", "error"] = "zeros",
) -> AudioTrack:
    """Read a clip's sound as 16 kHz mono on the picture's clock.

    The best audio stream is decoded with PyAV, its channels are averaged (as the released GAID code does), and librosa
    resamples with soxr. Sound before the picture or after the clip is dropped; where there is none, there are zeros.

    Args:
        path: a media file.
        duration: length of the clip in seconds; default: the span, else the picture's or the container's stated length,
            else the sound's.
        span: (start, end) of the clip in the file, seconds.
        on_corrupt: what to do with a track that is broken (undecodable packets, NaN samples): keep what was decoded,
            zeros elsewhere, and say so in `problem`; or raise.

    Returns:
        The track; `present` is False where the file has no sound in the clip.

    Raises:
        AudioError: the file cannot be opened, takes too long or holds too much; or a track is broken and `on_corrupt`
            is "error".
    """
    path = Path(path)
    try:
        with open_media(path) as container:
            pieces, length, rate, problem = _decode(container, duration, span, Allowance(path))
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
    allowance: Allowance,
) -> tuple[Pieces, float, int, str | None]:
    """Decode the best audio stream: pieces (first sample on the clip's clock, samples), clip length, rate, problem."""
    origin = _picture_start(container) + (span[0] if span else 0.0)
    known = duration if duration is not None else (span[1] - span[0] if span else _picture_length(container))
    stream = container.streams.best("audio")
    known = None if known is None else max(known, 0.0)  # a damaged header may state less than nothing
    _check_samples((known or 0.0) * SAMPLE_RATE, allowance.path)
    if not isinstance(stream, av.AudioStream):
        return [], known or 0.0, SAMPLE_RATE, None
    rate = stream.rate
    if not rate:
        return [], known or 0.0, SAMPLE_RATE, "has no sample rate"
    _check_samples((known or 0.0) * rate, allowance.path)
    if span and origin > 1.0 and stream.time_base:
        container.seek(int((origin - 1.0) / stream.time_base), stream=stream)
    pieces: Pieces = []
    failures: list[str] = []
    cursor: int | None = None
    count = 0
    for frame in _frames(container, stream, None if known is None else origin + known, failures, allowance):
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
        _check_samples(count, allowance.path)
    length = known if known is not None else max((cursor or 0) / rate, 0.0)
    _check_samples(length * max(rate, SAMPLE_RATE), allowance.path)
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
    allowance: Allowance,
) -> Iterator[av.AudioFrame]:
    """Decode packet by packet, so that a damaged packet costs its own samples and no others; note it in `failures`."""
    packets = packets_of(container, stream)
    for number in itertools.count(1):
        allowance.check()
        check_packets(number, allowance.path)
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


def _picture_start(container: av.container.InputContainer) -> float:
    """Second in the file's clock at which the picture begins; the clip's clock counts from there."""
    if container.streams.video:
        stream = container.streams.video[0]
        if stream.start_time is not None and stream.time_base:
            return float(stream.start_time * stream.time_base)
    return 0.0


def _picture_length(container: av.container.InputContainer) -> float | None:
    if not container.streams.video:
        return None
    stream = container.streams.video[0]
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration else None


def _mono(frame: av.AudioFrame) -> np.ndarray:
    """(T,) float32 mean of the channels, full scale = 1."""
    name = frame.format.name
    array = frame.to_ndarray()
    if not name.endswith("p"):
        array = array.reshape(-1, frame.layout.nb_channels).T
    kind = name.removesuffix("p")
    values = array.astype(np.float64) / _FULL_SCALE[kind] - (1.0 if kind == "u8" else 0.0)
    return values.mean(axis=0).astype(np.float32)


def _place(pieces: Pieces, length: float, rate: int) -> tuple[np.ndarray, list[tuple[int, int]], int]:
    """Lay the pieces onto (length * rate,) zeros.

    Nothing is done to the stretches between them, which take no memory until somebody writes there: a file may claim
    hours that it does not fill.

    Returns:
        The samples, with zeros for those that are no sound; start and end of what was decoded; how many were no sound.
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
    """(samples,) float32 at 16 kHz."""
    import librosa  # lazily imported by librosa's own design, yet a second that readers without sound save

    waveform = np.zeros(samples, dtype=np.float32)
    ends = [end for _, end in stretches]
    native = native[: max(ends, default=0) + rate]  # a second later the last sound has rung out
    if not native.any():
        return waveform
    if rate != SAMPLE_RATE:
        native = librosa.resample(native, orig_sr=rate, target_sr=SAMPLE_RATE, res_type="soxr_hq")
    kept = min(samples, len(native))
    waveform[:kept] = native[:kept]
    return waveform


def _heard(stretches: list[tuple[int, int]], rate: int, samples: int) -> np.ndarray:
    """(S,) bool, True for the 20 ms steps in which at least one sample was decoded."""
    heard = np.zeros(math.ceil(samples / STEP_SAMPLES), dtype=bool)
    for start, end in stretches:
        heard[start * STEPS_PER_SECOND // rate : -(-end * STEPS_PER_SECOND // rate)] = True
    return heard
