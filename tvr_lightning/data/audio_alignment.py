"""Conversion of an audio track into the input of an audio encoder, with the 20 ms steps of each frame."""

import functools
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from tvr_lightning.data.batch import AudioInput, Media
from tvr_lightning.media.audio import SAMPLE_RATE, STEP_SAMPLES, STEPS_PER_SECOND, AudioTrack, read_audio
from tvr_lightning.media.video import DecodedClip
from tvr_lightning.option_types import Options, Range

AudioKind = Literal["whisper", "wav2vec2"]
AudioAlignment = Literal["duration", "clip30"]
AudioSeconds = Annotated[float, Range(above=0, at_most=7200)]

WINDOW_SECONDS = 30
WINDOW_STEPS = WINDOW_SECONDS * STEPS_PER_SECOND
MEL_BANDS = 80
MEL_COLUMNS = 2 * WINDOW_STEPS
SHORTEST_WAVEFORM = 400

_warn_once = functools.cache(logging.getLogger(__name__).warning)


@dataclass
class AudioOptions(Options):
    """Settings for the input of the audio encoder and the alignment of its vectors with the frames.

    Attributes:
        kind: Audio encoder: "whisper" takes log-mel windows, "wav2vec2" takes the waveform.
        align: Alignment: "duration" assigns each moment to the nearest frame. "clip30" follows the released GAID code
            (datasets/audio_feature_extraction.py, model/clip_stochastic.py): Whisper receives one 30 s window,
            zero-padded or truncated, and its 1,500 vectors are pooled to F regardless of the clip length; the
            vectors of wav2vec2 for the whole track are interpolated to 1,500 and pooled in the same way.
        seconds: Maximum length of the audio of a clip in seconds, to which batches are padded. Later frames have no
            audio. Whisper with "clip30" always uses 30 s.
    """

    kind: AudioKind
    align: AudioAlignment = "duration"
    seconds: AudioSeconds = 60.0

    @property
    def windows(self) -> int:
        """Number of 30 s log-mel windows per clip."""
        return 1 if self.align == "clip30" else math.ceil(self.seconds / WINDOW_SECONDS)

    def describe(self) -> str:
        """Return a one-line description of the encoder input, which is part of a feature store's fingerprint."""
        return f"{self.kind} {self.align} {self.seconds:g}s"


def frame_cells(timestamps: Tensor, frame_mask: Tensor, duration: float) -> Tensor:
    """Return the cell of each frame, start and end (F, 2) in seconds: each moment belongs to the nearest frame.

    Frames in the middle of F equal segments get these segments. Padded frames get (0, 0); frames with the same
    timestamp (a repeated last frame) share a cell.
    """
    cells = torch.zeros(len(timestamps), 2, dtype=torch.float64)
    if frame_mask.any():
        moments, moment_of_frame = torch.unique(timestamps[frame_mask].double(), return_inverse=True)
        end = moments[-1:].clamp(min=duration)
        edges = torch.cat([torch.zeros_like(end), (moments[1:] + moments[:-1]) / 2, end])
        cells[frame_mask] = torch.stack([edges[:-1], edges[1:]], dim=1)[moment_of_frame]
    return cells


def audio_input(
    track: AudioTrack, options: AudioOptions, timestamps: Tensor, frame_mask: Tensor, duration: float
) -> AudioInput:
    """Convert a track into the input of an audio encoder for one clip (M = 1), with the steps (M, F, 2) of each frame.

    `timestamps` (F,) are in seconds from the start of the clip, and `frame_mask` (F,) is False for padding. Without
    audio, everything is zero and all windows are empty.
    """
    waveform = torch.from_numpy(track.waveform)
    most = round(options.seconds * SAMPLE_RATE)
    samples = min(len(waveform), most)
    if not track.present:
        samples = steps = 0
        windows = torch.zeros(len(timestamps), 2, dtype=torch.int64)
    elif options.align == "clip30":
        samples = len(waveform) if options.kind == "whisper" else samples
        steps = WINDOW_STEPS
        frames = torch.arange(len(timestamps) + 1)
        first, last = frames[:-1] * steps, frames[1:] * steps + len(timestamps) - 1  # as in `adaptive_avg_pool1d`
        windows = torch.stack([first, last], dim=1) // len(timestamps)
    else:
        if samples < len(waveform):
            message = "Some clips are longer than %g s. Later frames have no audio. Raise audio_seconds to include it."
            _warn_once(message, options.seconds)
        steps = math.ceil(samples / STEP_SAMPLES)
        if options.kind == "wav2vec2":
            steps = wav2vec2_steps(max(samples, SHORTEST_WAVEFORM))
        windows = _decoded_windows(frame_cells(timestamps, frame_mask, duration), track.heard, steps)
    waveform = waveform[:samples]
    values = _log_mel(waveform, options) if options.kind == "whisper" else _padded(waveform, most)
    return AudioInput(
        values[None], torch.tensor([samples]), torch.tensor([steps]), windows[None], [int(windows.amax())]
    )


def no_audio(options: AudioOptions, frames: int) -> AudioInput:
    """Return the input of zero clips (M = 0) with the other dimensions of the output of `audio_input`."""
    track = AudioTrack(np.zeros(0, np.float32), np.zeros(0, dtype=bool))
    return audio_input(track, options, torch.zeros(frames), torch.zeros(frames, dtype=torch.bool), 0.0)[:0]


def frames_media(clip: DecodedClip, times: Tensor, is_square: bool) -> Media:
    """Return the frames of a clip, with their times (F,) in seconds from its start, as silent media (M = 1)."""
    if is_square:
        return Media(clip.pixels[None], clip.frame_mask[None])
    return Media([clip.pixels[clip.frame_mask]], clip.frame_mask[None], times=times[None])


def clip_media(
    clip: DecodedClip,
    path: Path,
    span: tuple[float, float] | None,
    options: AudioOptions | None,
    on_corrupt: Literal["error", "skip"] = "skip",
    is_square: bool = True,
) -> Media:
    """Return a decoded clip as media (M = 1), with its audio if there are options for it.

    With `on_corrupt` skip, a broken track is read as far as possible and listed in `problems`. Unless
    `is_square`, frames keep their own size.
    """
    start, end = span or (0.0, clip.duration)
    times = (clip.timestamps - start).clamp(min=0)  # the frame on screen at the start may be an earlier one
    media = frames_media(clip, times, is_square)
    if options is None:
        return media
    end = min(end, clip.duration)
    track = read_audio(path, span=(start, end), on_corrupt=on_corrupt)
    media.audio = audio_input(track, options, times, clip.frame_mask, end - start)
    if track.problem:
        media.problems = [f"{path}: audio track: {track.problem}"]
    return media


def log_mel(waveform: Tensor) -> Tensor:
    """Return the log-mel spectrogram (80, T // 160) of a waveform (T,) at 16 kHz, a column per 10 ms."""
    from whisper.audio import log_mel_spectrogram  # imports numba, which takes a second that is saved without audio

    # One FFT frame needs 201 samples before its reflection; shorter waveforms are padded with silence.
    padded = _padded(waveform, max(len(waveform), SHORTEST_WAVEFORM))
    mel: Tensor = log_mel_spectrogram(padded, n_mels=MEL_BANDS)
    return mel


def wav2vec2_steps(samples: int) -> int:
    """Return the number of output vectors of wav2vec2's seven convolutions (kernels 10 3 3 3 3 2 2)."""
    steps = samples
    for kernel, stride in ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)):
        steps = (steps - kernel) // stride + 1
    return max(steps, 0)


def _log_mel(waveform: Tensor, options: AudioOptions) -> Tensor:
    if not len(waveform):
        return torch.zeros(options.windows, MEL_BANDS, MEL_COLUMNS)
    if options.align == "duration":
        padded = _padded(waveform, options.windows * WINDOW_SECONDS * SAMPLE_RATE)
        return log_mel(padded).reshape(MEL_BANDS, options.windows, MEL_COLUMNS).transpose(0, 1).contiguous()
    # The released code pads the spectrogram, not the audio; its maximum is over the whole track.
    return _padded(log_mel(waveform)[:, :MEL_COLUMNS], MEL_COLUMNS)[None]


def _padded(values: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - values.shape[-1]))


def _decoded_windows(cells: Tensor, heard: np.ndarray, steps: int) -> Tensor:
    """Return the first and one-past-last decoded step in each cell (F, 2); (0, 0) if there is none."""
    windows = torch.zeros(len(cells), 2, dtype=torch.int64)
    for frame, (start, end) in enumerate(cells.tolist()):
        # Rounding first: 0.1 * 50 must not become step 5.000000001 and include a step of the next frame.
        first = math.floor(round(start * STEPS_PER_SECOND, 6))
        last = min(math.ceil(round(end * STEPS_PER_SECOND, 6)), steps)
        inside = np.flatnonzero(heard[first:last])
        if len(inside):
            windows[frame] = torch.tensor([first + int(inside[0]), first + int(inside[-1]) + 1])
    return windows
