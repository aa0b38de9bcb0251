"""The audio of a clip as 16 kHz mono, synchronized with the video.

Time is counted in steps of 20 ms, because Whisper and wav2vec 2.0 both return one vector per 20 ms of audio.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import av
import numpy as np

from tvr_lightning.media.container import MediaError, TimeBudget, open_media, packets_of

SAMPLE_RATE = 16_000
STEP_SAMPLES = 320
STEPS_PER_SECOND = SAMPLE_RATE // STEP_SAMPLES

_JITTER_SECONDS = 0.05  # containers round timestamps to 1 ms or more; larger steps are real gaps
_MAX_SAMPLES = 2**30  # six hours at 48 kHz
_LOUDEST_SAMPLE = 1000.0  # times full scale; float tracks overshoot slightly, invalid data by orders of magnitude
_FULL_SCALE = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "s64": 2.0**63, "flt": 1.0, "dbl": 1.0}


@dataclass
class AudioTrack:
    """The audio of one clip, synchronized with the video: sample 0 is at the start of the clip."""

    waveform: np.ndarray  # (T,) float32 at 16 kHz, mono, zero if nothing was decoded
    heard: np.ndarray  # (S,) bool, True for 20 ms steps with decoded samples; S = ceil(T / 320)
    problem: str | None = None  # description of the damage; a clip without an audio track has none

    @property
    def present(self) -> bool:
        """True if any audio was decoded."""
        return bool(self.heard.any())


def read_audio(
    path: str | Path,
    *,
    span: tuple[float, float] | None = None,
    on_corrupt: Literal["skip", "error"] = "skip",
) -> AudioTrack:
    """Read a clip's audio as 16 kHz mono, synchronized with the video.

    PyAV decodes the best audio stream, its channels are averaged (as in the released GAID code), and librosa resamples
    with soxr. Audio outside the clip is dropped, and missing audio is filled with zeros; `present` is False if there is
    none. The duration is that of the span, the video, the container, or the audio, in this order. In a damaged track,
    `skip` keeps the decoded samples and describes the damage in `problem`.

    Raises:
        MediaError: The file cannot be opened, takes too long, or is too large; or a track is damaged (`error`).
    """
    path = Path(path)
    pieces: list[tuple[int, np.ndarray]] = []
    problems: list[str] = []
    rate = SAMPLE_RATE
    try:
        with open_media(path) as container:
            origin, length = _bounds(container, span)
            stream = container.streams.best("audio")
            if isinstance(stream, av.AudioStream):
                rate = stream.rate or rate
            _check_samples((length or 0.0) * max(rate, SAMPLE_RATE), path)
            if isinstance(stream, av.AudioStream):
                if span and origin > 1.0 and stream.time_base:
                    container.seek(int((origin - 1.0) / stream.time_base), stream=stream)
                end = math.inf if length is None else origin + length
                failures: list[str] = []
                pieces = list(_decode(container, stream, rate, origin, end, failures, path))
                if failures:
                    problems.append(f"{len(failures)} failures, first: {failures[0]}")
                elif not pieces and not span:
                    problems.append("has no samples")
    except av.FFmpegError as error:
        raise MediaError(path, f"its audio cannot be read ({error.strerror})") from error
    if length is None:
        length = max(pieces[-1][0] + len(pieces[-1][1]), 0) / rate if pieces else 0.0
    # Zeros take no memory, since a file may declare hours.
    native = np.zeros(round(length * rate), dtype=np.float32)
    waveform = np.zeros(round(length * SAMPLE_RATE), dtype=np.float32)
    heard = np.zeros(math.ceil(len(waveform) / STEP_SAMPLES), dtype=bool)
    last, invalid = 0, 0
    for place, samples in pieces:
        start, stop = max(place, 0), min(place + len(samples), len(native))
        if start < stop:
            inside = samples[start - place : stop - place]
            valid = np.isfinite(inside) & (np.abs(inside) <= _LOUDEST_SAMPLE)
            invalid += int((~valid).sum())
            native[start:stop] = np.where(valid, inside, np.float32(0.0))
            heard[start * STEPS_PER_SECOND // rate : -(-stop * STEPS_PER_SECOND // rate)] = True
            last = max(last, stop)
    if invalid:
        problems.append(f"{invalid} samples are NaN, infinite or out of range")
    if problems and on_corrupt == "error":
        raise MediaError(path, f"audio track: {'; '.join(problems)}")
    native = native[: last + rate]  # the filter of the resampling ends within a second
    if rate != SAMPLE_RATE and native.any():
        import librosa  # takes a second that readers without audio save

        native = librosa.resample(native, orig_sr=rate, target_sr=SAMPLE_RATE, res_type="soxr_hq")
    waveform[: len(native)] = native[: len(waveform)]
    return AudioTrack(waveform, heard, "; ".join(problems) or None)


def _bounds(container: av.container.InputContainer, span: tuple[float, float] | None) -> tuple[float, float | None]:
    """Return the start of a clip in the time of its file, and its duration if it is known without decoding."""
    origin = 0.0
    length = None
    if container.streams.video:
        video = container.streams.video[0]
        if container.duration:
            length = container.duration / av.time_base
        if video.time_base:  # time 0 of the clip is the start of the video
            origin = float((video.start_time or 0) * video.time_base)
            length = float(video.duration * video.time_base) if video.duration else length
    if span:
        origin = origin + span[0]
        length = span[1] - span[0]
    return origin, None if length is None else max(length, 0.0)  # the header of a damaged file can be negative


def _check_samples(count: float, path: Path) -> None:
    if count > _MAX_SAMPLES:
        found = f"its audio is {count:,.0f} samples long"
        raise MediaError(path, f"{found}; the maximum is {_MAX_SAMPLES:,}, six hours at 48 kHz")


def _decode(
    container: av.container.InputContainer,
    stream: av.AudioStream,
    rate: int,
    origin: float,
    end: float,
    failures: list[str],
    path: Path,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the position of the first sample in the clip, and samples (T,), up to the time `end`.

    Packets are decoded one by one, so that a damaged packet affects no other samples; errors are added to `failures`.
    """
    count = 0
    cursor = None
    try:
        for packet in packets_of(container, TimeBudget(path), stream):
            moment = None if packet.pts is None or packet.time_base is None else float(packet.pts * packet.time_base)
            if moment is not None and moment > end + 1.0:
                return
            try:
                frames = cast(list[av.AudioFrame], packet.decode())
            except av.FFmpegError as error:
                where = "the last packet" if moment is None else f"packet at {moment:.2f} s"
                failures.append(f"{where}: {error.strerror}")
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
                _check_samples(max(count, cursor), path)
    except av.FFmpegError as error:
        failures.append(f"the file ends early: {error.strerror}")


def _mono(frame: av.AudioFrame) -> np.ndarray:
    """Return the mean of the channels, (T,) float32, full scale = 1."""
    array = frame.to_ndarray()
    if not frame.format.is_planar:
        array = array.reshape(-1, frame.layout.nb_channels).T
    kind = frame.format.packed.name
    values = array.astype(np.float64) / _FULL_SCALE[kind] - (1.0 if kind == "u8" else 0.0)
    return np.asarray(values.mean(axis=0), np.float32)
