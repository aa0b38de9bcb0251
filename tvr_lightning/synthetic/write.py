"""Encoding of a synthetic scene, with its audio, as a media file."""

import platform
import zlib
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import cast

import av
import numpy as np
import numpy.typing as npt

from tvr_lightning.synthetic.render import HEIGHT, WIDTH, render
from tvr_lightning.synthetic.scene import Scene

_X264 = {"preset": "veryfast", "crf": "24", "g": "20"}
if platform.machine().lower() in ("x86_64", "amd64"):
    # SSE2 is available on all x86-64 CPUs. AVX2 rounds differently, and on a machine with AVX-512, 6 of 8,160 videos
    # differed from earlier encodings of the same scenes, but none of 9,736 with SSE2. Audio is not restricted.
    _X264["x264-params"] = "asm=sse2"
_H264 = ("libx264", _X264)
_AAC = ("aac", {"aac_coder": "fast"})  # the default coder takes longer than all other steps together
_MPEG4, _MP3 = ("mpeg4", {"qmin": "2", "qmax": "5", "g": "20"}), ("libmp3lame", {"compression_level": "7"})
_CODECS = {".mp4": (_H264, _AAC), ".mov": (_H264, _AAC), ".avi": (_MPEG4, _MP3)}
_AUDIO_FRAMES = 10  # per second
RATE = 16000  # samples per second
_PITCH = {"low": 220.0, "high": 1760.0}  # Hz
_BEEPS = {"slow": 1.0, "fast": 4.0}  # per second
_SWEEP = (300.0, 2400.0)  # Hz, once in two seconds


def write_video(scene: Scene, path: Path, fps: int) -> None:
    """Write a scene as .mp4 or .mov (H.264, AAC) or .avi (MPEG-4, MP3).

    Equal scenes yield equal bytes on one machine. Other x86 CPUs yield the same bytes for the frames of .mp4 and .mov;
    audio may differ by rounding in its encoder.
    """
    (video_codec, video_options), (audio_codec, audio_options) = _CODECS[path.suffix]
    with av.open(str(path), "w", options={"fflags": "+bitexact"}) as container:
        video = cast(av.VideoStream, container.add_stream(video_codec, fps, video_options))
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        video.codec_context.thread_count = 1  # videos are encoded in parallel
        audio: av.AudioStream | None = None
        if scene.audio_track:
            audio = cast(av.AudioStream, container.add_stream(audio_codec, RATE, audio_options, layout="mono"))
            audio.bit_rate = 32000
        sound = _audio_frames(scene)
        for index, pixels in enumerate(render(scene, fps)):
            # Converted here in one thread: in the encoder, about one frame in a thousand had different bytes.
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p", threads=1)
            frame.pts, frame.time_base = index, Fraction(1, fps)
            container.mux(video.encode(frame))
            if audio is not None and index % fps == 0:  # alternating every second keeps the muxer's buffer small
                container.mux([packet for part in islice(sound, _AUDIO_FRAMES) for packet in audio.encode(part)])
        container.mux(video.encode(None))
        if audio is not None:
            container.mux([packet for part in sound for packet in audio.encode(part)])
            container.mux(audio.encode(None))


def _audio_frames(scene: Scene) -> Iterator[av.AudioFrame]:
    samples = waveform(scene.sound, scene.duration)
    block = RATE // _AUDIO_FRAMES
    for start in range(0, len(samples), block):
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None, start : start + block]), "fltp", "mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, start, Fraction(1, RATE)
        yield frame


def waveform(sound: str, duration: float) -> npt.NDArray[np.float32]:
    """Return the samples of an audio pattern in -1 to 1, (duration x RATE,) float32, mono; zeros for silence."""
    t = np.arange(round(duration * RATE)) / RATE
    words = sound.split()
    if sound == "silence":
        samples = np.zeros_like(t)
    elif sound == "hiss":
        samples = 0.25 * np.random.default_rng(zlib.crc32(b"hiss")).uniform(-1, 1, len(t))
    elif words[1] == "sweep":
        within = (t % 2.0) / 2.0
        low, high = _SWEEP if words[0] == "rising" else _SWEEP[::-1]
        samples = 0.4 * np.sin(2 * np.pi * np.cumsum(low * (high / low) ** within) / RATE)
    elif words[1] == "hum":
        samples = _tone(_PITCH[words[0]], t)
    else:
        samples = _tone(_PITCH[words[1]], t) * ((t * _BEEPS[words[0]]) % 1.0 < 0.5)
    return samples.astype(np.float32)


def _tone(pitch: float, t: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    phase = 2 * np.pi * pitch * t
    return 0.35 * np.sin(phase) + 0.1 * np.sin(2 * phase)
