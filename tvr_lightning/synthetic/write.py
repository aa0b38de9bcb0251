"""Encoding of a synthetic scene as a media file."""

import platform
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import cast

import av
import numpy as np

from tvr_lightning.errors import UserError
from tvr_lightning.synthetic.render import HEIGHT, WIDTH, render
from tvr_lightning.synthetic.scene import Scene
from tvr_lightning.synthetic.sound import RATE, waveform

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


def write_video(scene: Scene, path: Path, fps: int) -> None:
    """Write a scene as .mp4 or .mov (H.264, AAC) or .avi (MPEG-4, MP3).

    Equal scenes yield equal bytes on one machine. Other x86 CPUs yield the same bytes for the frames of .mp4 and .mov;
    audio may differ by rounding in its encoder.
    """
    if path.suffix not in _CODECS:
        raise UserError(f"{path}: cannot write a {path.suffix or 'suffixless'} video; use one of {', '.join(_CODECS)}")
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
