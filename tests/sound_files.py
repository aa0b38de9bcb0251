"""Video files for tests whose sound is known: tones, bursts, and every way in which a track can be odd or broken."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

from tvr_lightning.data.audio_alignment import AudioOptions, audio_input
from tvr_lightning.data.batch import AudioInput, Media
from tvr_lightning.media.audio import AudioTrack

FPS = 10


def tone(seconds: float, rate: int = 16_000, frequency: float = 440.0, channels: int = 1) -> np.ndarray:
    """(channels, T) float32 sine of amplitude 0.5."""
    wave = 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)
    return np.tile(wave.astype(np.float32), (channels, 1))


def burst(seconds: float, start: float, stop: float, rate: int = 16_000) -> np.ndarray:
    """(1, T) float32, a tone between two moments and digital silence around it."""
    wave = tone(seconds, rate)
    moments = np.arange(wave.shape[1]) / rate
    return wave * ((moments >= start) & (moments < stop))


def write_clip(
    path: Path,
    sound: np.ndarray | None,
    rate: int = 16_000,
    *,
    seconds: float = 2.0,
    codec: str = "pcm_s16le",
    layout: str = "mono",
    sound_start: float = 0.0,
    picture_start: float = 0.0,
    spoil: Callable[[int], bool] = lambda number: False,
) -> Path:
    """Write a clip with a grey picture of `seconds` and a sound track.

    Args:
        path: the suffix decides the container (.mkv takes every codec here).
        sound: (channels, T) float32; None for no track.
        rate: of the sound.
        seconds: length of the picture.
        codec: of the sound.
        layout: of its channels.
        sound_start, picture_start: second at which each begins.
        spoil: says which packets of the sound (numbered from 0) are replaced with garbage.
    """
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=FPS)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        audio = None if sound is None else container.add_stream(codec, rate=rate, layout=layout)
        picture = np.full((64, 64, 3), 128, dtype=np.uint8)
        for number in range(round(seconds * FPS)):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = number + round(picture_start * FPS)
            frame.time_base = Fraction(1, FPS)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None and sound is not None:
            for number, packet in enumerate(_packets(audio, sound, rate, layout, sound_start)):
                container.mux(_garbage(packet, audio) if spoil(number) and packet.size else packet)
    return path


def _packets(stream: av.AudioStream, sound: np.ndarray, rate: int, layout: str, start: float) -> list[av.Packet]:
    packets = []
    context = stream.codec_context  # open since the picture's packets were written
    resampler = av.AudioResampler(format=context.format.name, layout=layout, rate=rate)
    size = context.frame_size or 1024
    for first in range(0, sound.shape[1], size):
        piece = np.ascontiguousarray(sound[:, first : first + size])
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=layout)
        frame.sample_rate = rate
        frame.pts = first + round(start * rate)
        frame.time_base = Fraction(1, rate)
        for converted in resampler.resample(frame):
            packets += stream.encode(converted)
    return packets + stream.encode(None)


def _garbage(packet: av.Packet, stream: av.AudioStream) -> av.Packet:
    spoilt = av.Packet(np.random.default_rng(0).integers(0, 200, packet.size, dtype=np.uint8).tobytes())
    spoilt.pts, spoilt.dts, spoilt.time_base, spoilt.stream = packet.pts, packet.dts, packet.time_base, stream
    spoilt.duration = packet.duration
    return spoilt


def track_of(waveform: np.ndarray | Tensor) -> AudioTrack:
    """A track that is heard from beginning to end."""
    waveform = np.asarray(waveform, dtype=np.float32).reshape(-1)
    return AudioTrack(waveform, np.ones(-(-len(waveform) // 320), dtype=bool))


def silent_track(seconds: float) -> AudioTrack:
    return AudioTrack(np.zeros(round(seconds * 16_000), np.float32), np.zeros(round(seconds * 50), dtype=bool))


def noise(seconds: float, seed: int = 0, mean: float = 0.0, deviation: float = 0.1) -> Tensor:
    waveform = np.random.default_rng(seed).normal(mean, deviation, round(seconds * 16_000))
    return torch.from_numpy(waveform.astype(np.float32))


def centers(seconds: float, frames: int) -> tuple[Tensor, Tensor]:
    """(F,) centers of F equal segments, and the mask of F frames."""
    return (torch.arange(frames) + 0.5) * seconds / frames, torch.ones(frames, dtype=torch.bool)


def given_to(track: AudioTrack, options: AudioOptions, seconds: float, frames: int = 12) -> AudioInput:
    """What an audio encoder is given of a clip of this length with frames in the middle of equal segments."""
    return audio_input(track, options, *centers(seconds, frames), seconds)


def media_of(audio: AudioInput) -> Media:
    count, frames = audio.windows.shape[:2]
    return Media(torch.zeros(count, frames, 3, 8, 8, dtype=torch.uint8), torch.ones(count, frames, dtype=bool), audio)
