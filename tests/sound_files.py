"""Video files with known audio: tones, bursts, and unusual or broken tracks."""

from fractions import Fraction

import av
import numpy as np
import torch

from tvr_lightning.data.audio_alignment import audio_input
from tvr_lightning.data.batch import Media
from tvr_lightning.media.audio import AudioTrack


def tone(seconds, rate=16_000, frequency=440.0, channels=1):
    """(channels, T) float32 sine of amplitude 0.5."""
    wave = 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)
    return np.tile(wave.astype(np.float32), (channels, 1))


def burst(seconds, start, stop, rate=16_000):
    """(1, T) float32, a tone between two moments and digital silence around it."""
    wave = tone(seconds, rate)
    moments = np.arange(wave.shape[1]) / rate
    return wave * ((moments >= start) & (moments < stop))


def write_clip(
    path, sound, rate=16_000, *, seconds=2.0, codec="pcm_s16le", layout="mono", sound_start=0.0, picture_start=0.0,
    spoil=lambda number: False, gray=128, fps=10,
):  # fmt: skip
    """Write a clip with `seconds` of gray frames and an audio track.

    `sound` is (channels, T) float32, or None for no track. Frames and audio begin at their start in seconds. Audio
    packets whose number satisfies `spoil` are replaced with garbage.
    """
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=fps)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        audio = None if sound is None else container.add_stream(codec, rate=rate, layout=layout)
        for number in range(round(seconds * fps)):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), gray, dtype=np.uint8), format="rgb24")
            frame.pts, frame.time_base = number + round(picture_start * fps), 1 / Fraction(fps)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if sound is not None:
            for number, packet in enumerate(_packets(audio, sound, rate, layout, sound_start)):
                container.mux(_garbage(packet, audio) if spoil(number) and packet.size else packet)
    return path


def _packets(stream, sound, rate, layout, start):
    packets = []
    context = stream.codec_context  # open since the packets of the frames were written
    resampler = av.AudioResampler(format=context.format.name, layout=layout, rate=rate)
    size = context.frame_size or 1024
    for first in range(0, sound.shape[1], size):
        samples = np.ascontiguousarray(sound[:, first : first + size])
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        frame.sample_rate = rate
        frame.pts, frame.time_base = first + round(start * rate), Fraction(1, rate)
        for converted in resampler.resample(frame):
            packets += stream.encode(converted)
    return packets + stream.encode(None)


def _garbage(packet, stream):
    spoilt = av.Packet(np.random.default_rng(0).integers(0, 200, packet.size, dtype=np.uint8).tobytes())
    spoilt.pts, spoilt.dts, spoilt.time_base, spoilt.stream = packet.pts, packet.dts, packet.time_base, stream
    spoilt.duration = packet.duration
    return spoilt


def track_of(waveform):
    """A track that is present from beginning to end."""
    waveform = np.asarray(waveform, dtype=np.float32).reshape(-1)
    return AudioTrack(waveform, np.ones(-(-len(waveform) // 320), dtype=bool))


def silent_track(seconds):
    return AudioTrack(np.zeros(round(seconds * 16_000), np.float32), np.zeros(round(seconds * 50), dtype=bool))


def noise(seconds, seed=0, mean=0.0, deviation=0.1):
    waveform = np.random.default_rng(seed).normal(mean, deviation, round(seconds * 16_000))
    return torch.from_numpy(waveform.astype(np.float32))


def centers(seconds, frames):
    """(F,) centers of F equal segments, and the mask of F frames."""
    return (torch.arange(frames) + 0.5) * seconds / frames, torch.ones(frames, dtype=torch.bool)


def given_to(track, options, seconds, frames=12):
    """Input of an audio encoder for a clip of this length with frames in the middle of equal segments."""
    return audio_input(track, options, *centers(seconds, frames), seconds)


def media_of(audio):
    count, frames = audio.windows.shape[:2]
    return Media(torch.zeros(count, frames, 3, 8, 8, dtype=torch.uint8), torch.ones(count, frames, dtype=bool), audio)
