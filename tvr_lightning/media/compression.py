"""Small copies of video files for training: few frames per second, no larger than the encoder's input, with audio.

Reading a clip decodes every frame from a keyframe to the last selected one. Copies have few, small frames and a
keyframe at the start of each second. They keep the timing: the frame at k / fps seconds is the one that the original
shows then, and the last frame ends at the same time. With `like`, copies contain the frames that released code of other
authors produces.
"""

import io
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import av
import numpy as np
from av.container import InputContainer, OutputContainer
from PIL import Image

from tvr_lightning.errors import UserError
from tvr_lightning.media.audio import SAMPLE_RATE, read_audio
from tvr_lightning.media.clip4clip_copies import FPS, SIZE, write_clip4clip_frames
from tvr_lightning.media.container import MediaError, TimeBudget, VideoError, open_media, open_video, packets_of
from tvr_lightning.media.decoder import decoded_frames
from tvr_lightning.media.preparation import Interpolation, Pixels, resized
from tvr_lightning.media.video import frames_at_rate, probe
from tvr_lightning.option_types import CopiesLike, Count, Options, Range

CRF = 18
_TICKS = 30_000  # ticks per frame in the copy's time base, so that the last frame can end between two frames
_COPIED_AUDIO = ("aac", "mp3", "ac3", "eac3", "alac", "opus", "flac")  # codecs that mp4 supports


@dataclass
class Compression(Options):
    """Settings for making copies. Raise UserError if an option is out of range or contradicts `like`."""

    fps: Count = FPS
    size: Annotated[int, Range(at_least=16)] = SIZE  # short side in pixels; smaller frames are kept, none is cropped
    interpolation: Interpolation = "bicubic"  # the same as in the encoder's preparation
    like: CopiesLike | None = None  # authors whose script defines the frames; all other options keep their defaults

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.like and replace(self, like=None) != Compression():
            raise UserError(f"--like {self.like} sets {FPS} fps and {SIZE} pixels. Omit --fps and --size.")

    def describe(self) -> str:
        """Return a description, which is part of run cards."""
        return f"compressed {self.fps} fps {self.size}" + (f" like {self.like}" if self.like else "")

    def __call__(self, frame: Image.Image) -> Pixels:
        """Return an RGB frame as stored, (height, width, 3): its short side has `size` pixels, and both sides are even.

        A side of odd length is extended by a copy of its outermost pixels, at the end that keeps the center `size`
        pixels in place.
        """
        pixels = np.asarray(frame)
        short = min(frame.size)
        if short > self.size:
            scaled = (int(self.size * frame.width / short), int(self.size * frame.height / short))
            pixels = resized(frame, scaled, self.interpolation, antialias=True)
        padding = [(0, 0), (0, 0), (0, 0)]
        for axis, side in enumerate(pixels.shape[:2]):
            if side % 2:
                before = round((side + 1 - self.size) / 2) - round((side - self.size) / 2)
                padding[axis] = (before, 1 - before)
        return np.pad(pixels, padding, mode="edge").astype(np.uint8, copy=False)


@dataclass
class Copy:
    """A copy in memory."""

    content: bytes  # of an mp4 file
    frames: int
    duration: float  # of the video, in seconds
    sound: int  # number of audio packets; 0 if the original has no audio
    notes: list[str] = field(default_factory=list)  # differences from the original


def compress(path: Path, how: Compression) -> Copy:
    """Make a small copy of a video file. Raise VideoError if the video cannot be read to its end.

    The audio is copied packet by packet if mp4 supports its codec, as far as it is intact. Otherwise it is encoded as
    AAC, 16 kHz mono, the format that readers use anyway.
    """
    try:
        with suppress(av.FFmpegError):  # such as packets whose timestamps mp4 cannot represent
            return _write(path, how, copy_audio=True)
        return _write(path, how, copy_audio=False)
    except av.FFmpegError as error:
        raise VideoError(path, f"cannot be copied ({error.strerror})") from error


def _write(path: Path, how: Compression, copy_audio: bool) -> Copy:
    buffer = io.BytesIO()
    audio: list[av.Packet[Any]] = []
    notes: list[str] = []
    with open_video(path) as (container, video), av.open(buffer, "w", format="mp4") as out:
        source = container.streams.best("audio")
        if isinstance(source, av.AudioStream) and source.codec_context:
            if copy_audio and source.codec_context.name in _COPIED_AUDIO:
                origin = (video.start_time or 0) * (video.time_base or Fraction(0))
                if how.like:  # such a copy starts with the first stream
                    origin = Fraction(container.start_time or 0, av.time_base)
                track = out.add_stream_from_template(source)
                audio = _copied_audio(path, container, source, track, origin, notes)
            else:
                audio = _encoded_audio(path, out, notes)
        if how.like:
            frames = write_clip4clip_frames(path, out)
            duration = frames / how.fps
        else:
            frames, duration = _write_frames(path, how, out)
        out.mux(audio)
    return Copy(buffer.getvalue(), frames, duration, len(audio), notes)


def _copied_audio(
    path: Path,
    container: InputContainer,
    source: av.AudioStream,
    track: av.AudioStream,
    origin: Fraction,
    notes: list[str],
) -> list["av.Packet[Any]"]:
    """Return the packets of an audio stream for a track that starts at the time `origin` of the file."""
    packets = []
    try:
        for packet in packets_of(container, TimeBudget(path), source):
            if packet.size and packet.is_corrupt:
                notes.append("its audio ends early: a packet is truncated")
                break
            if packet.size and packet.pts is not None:
                packet.pts -= round(origin / packet.time_base)  # an edit list removes audio before the first frame
                packet.dts = packet.pts
                packet.stream = track
                packets.append(packet)
    except av.FFmpegError as error:
        notes.append(f"its audio ends early: {error.strerror}")
    return packets


def _encoded_audio(path: Path, out: OutputContainer, notes: list[str]) -> list["av.Packet[Any]"]:
    """Add an AAC stream with the audio as readers use it, and return its packets; none if nothing can be decoded."""
    try:
        audio = read_audio(path)
    except MediaError as error:
        notes.append(f"its audio is omitted: {error.reason}")
        return []
    if audio.problem:
        notes.append(f"its audio is damaged: {audio.problem}")
    if not audio.present:
        notes.append("its audio is omitted, since it is empty")
        return []
    notes.append("its audio is converted to 16 kHz mono")
    track = out.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
    track.bit_rate = 64_000
    frame = av.AudioFrame.from_ndarray(audio.waveform[None], format="fltp", layout="mono")
    frame.sample_rate = SAMPLE_RATE
    frame.pts = 0
    frame.time_base = Fraction(1, SAMPLE_RATE)
    return [*track.encode(frame), *track.encode(None)]


def _write_frames(path: Path, how: Compression, out: OutputContainer) -> tuple[int, float]:
    """Write the frames, starting at 0, and return their number and their duration, which is that of the original."""
    duration = 0.0

    def frames() -> Generator[tuple[float, Pixels], None, None]:
        nonlocal duration
        duration = yield from frames_at_rate(path, how.fps, how)

    clock = Fraction(1, how.fps * _TICKS)
    packets: list[av.Packet[Any]] = []
    for number, (_, pixels) in enumerate(frames()):
        image = Image.fromarray(pixels)
        if not packets:
            stream = _video_stream(out, how, image.size, clock)
        if image.size != (stream.width, stream.height):  # all frames of a copy have the same size
            image = image.resize((stream.width, stream.height))
        encoded = av.VideoFrame.from_ndarray(np.asarray(image), "rgb24")
        encoded.pts = number * _TICKS
        encoded.time_base = clock
        (packet,) = stream.encode(encoded)
        packet.pts = packet.dts = number * _TICKS
        packet.duration = _TICKS
        packets.append(packet)
    packets[-1].duration = max(round(duration / clock) - (len(packets) - 1) * _TICKS, 1)
    out.mux(packets)
    return len(packets), duration


def _video_stream(out: OutputContainer, how: Compression, size: tuple[int, int], clock: Fraction) -> av.VideoStream:
    # Each frame depends only on the previous one, and each second starts with a keyframe: a frame in, a packet out.
    options = {"crf": str(CRF), "preset": "veryfast", "tune": "fastdecode,zerolatency", "g": str(how.fps)}
    stream = out.add_stream("libx264", rate=how.fps, options=options)
    stream.pix_fmt = "yuv420p"
    stream.thread_count = 1
    stream.width, stream.height = size
    stream.time_base = stream.codec_context.time_base = clock
    return stream


def verify_copy(path: Path, copy: Copy) -> None:
    """Read a written copy from start to end, and raise VideoError if its content differs from what was written."""
    found = probe(path)
    if found.broken:
        raise VideoError(path, found.broken)
    budget = TimeBudget(path)
    frames = sum(1 for _ in decoded_frames(budget))
    sound = 0
    with open_media(path) as container:
        track = container.streams.best("audio")
        if isinstance(track, av.AudioStream):
            sound = sum(packet.size > 0 for packet in packets_of(container, budget, track))
    if (frames, sound) != (copy.frames, copy.sound) or abs(found.duration - copy.duration) > 0.001:
        raise VideoError(
            path,
            f"was written with {copy.frames} frames in {copy.duration:.3f} s and {copy.sound} audio packets, but "
            f"reads back as {frames} in {found.duration:.3f} s and {sound}",
        )
