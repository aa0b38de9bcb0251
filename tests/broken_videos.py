"""Video files for tests: frames that show their number, and unusual or broken files."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.stream import Disposition

SIZE = 64
BITS = 8


def numbered(number, width=SIZE, height=SIZE):
    """(height, width, 3) uint8: the number in eight black and white bars, upside down in the lower half."""
    picture = np.zeros((height, width, 3), dtype=np.uint8)
    for bit in range(BITS):
        left, right = bit * width // BITS, (bit + 1) * width // BITS
        on = bool(number >> bit & 1)
        picture[: height // 2, left:right] = 255 * on
        picture[height // 2 :, left:right] = 255 * (not on)
    # With noise, frames are most of a file.
    return picture ^ np.random.default_rng(number).integers(0, 64, picture.shape, dtype=np.uint8)


def numbers_of(pixels):
    """The numbers in (F, 3, S, S) uint8 frames made by `numbered`; fails on a frame without a number."""
    numbers = []
    for frame in pixels.float().mean(1):
        side = frame.shape[-1]
        centers = [(2 * bit + 1) * side // (2 * BITS) for bit in range(BITS)]
        upper, lower = frame[side // 4, centers] > 128, frame[3 * side // 4, centers] > 128
        assert (upper != lower).all(), "the frame contains no number"
        numbers.append(sum(int(on) << bit for bit, on in enumerate(upper.tolist())))
    return numbers


def write_video(
    path, frames=60, *, rate=10, size=(SIZE, SIZE), codec="libx264", pixel_format="yuv420p", options=None,
    container_options=None, stamps=None, rotation=0, sound=0.0, sound_rate=16000, picture=numbered,
):  # fmt: skip
    """Write a video of numbered frames; `stamps` are times in milliseconds, `sound` seconds of a tone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, pixel_format
        stream.options = {"preset": "veryfast"} | (options or {}) if codec == "libx264" else options or {}
        if stamps is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        tone = container.add_stream("aac", rate=sound_rate) if sound else None
        if tone is not None:
            _mux_tone(container, tone, sound)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")
            if stamps is not None:
                frame.pts, frame.time_base = stamps[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_sound(path, seconds=2.0, codec="aac"):
    """Write a file with audio only."""
    with av.open(str(path), "w") as container:
        _mux_tone(container, container.add_stream(codec, rate=16000, layout="mono"), seconds)
    return path


def write_song(path):
    """Write an audio file with a cover image."""
    with av.open(str(path), "w") as container:
        sound, cover = container.add_stream("aac", rate=16000), container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = SIZE, SIZE, "yuvj420p"
        cover.disposition = Disposition.attached_pic
        container.mux(cover.encode(av.VideoFrame.from_ndarray(numbered(1), format="rgb24")))
        container.mux(cover.encode(None))
        _mux_tone(container, sound, 2.0)
    return path


def _mux_tone(container, stream, seconds):
    rate = stream.rate
    wave = np.sin(np.arange(int(seconds * rate)) * 2 * np.pi * 440 / rate).astype(np.float32)
    for start in range(0, len(wave), 1024):
        frame = av.AudioFrame.from_ndarray(wave[None, start : start + 1024], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = rate, start
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def cut_off(path: Path, share: float) -> Path:
    """Keep the first `share` of a file's bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def scramble(path: Path, begin: float, end: float) -> Path:
    """Overwrite a segment of an mp4's frames, given as shares of their length."""
    data = bytearray(path.read_bytes())
    pictures = data.find(b"mdat") + 4
    first, last = (pictures + int((len(data) - pictures) * share) for share in (begin, end))
    data[first:last] = np.random.default_rng(0).bytes(last - first)
    path.write_bytes(data)
    return path


def lie_about_length(path: Path, factor: int) -> Path:
    """Multiply the durations in an mp4's movie, track and media headers (version 0 boxes)."""
    data = bytearray(path.read_bytes())
    for box, offset in ((b"mvhd", 16), (b"tkhd", 20), (b"mdhd", 16)):
        field = slice(data.find(box) + 4 + offset, data.find(box) + 8 + offset)
        data[field] = (int.from_bytes(data[field], "big") * factor).to_bytes(4, "big")
    path.write_bytes(data)
    return path


def stop_clock(path: Path, only_first: bool = False) -> Path:
    """Give all frames of an mp4, or those of its first length, one timestamp (`stts`: entries of count and length)."""
    data = bytearray(path.read_bytes())
    entries = data.find(b"stts") + 8
    for entry in range(1 if only_first else int.from_bytes(data[entries : entries + 4], "big")):
        data[entries + 8 * entry + 8 : entries + 8 * entry + 12] = bytes(4)
    path.write_bytes(data)
    return path


def rename_codec(path: Path) -> Path:
    """Give an mp4's video an unknown codec."""
    path.write_bytes(path.read_bytes().replace(b"avc1", b"zzzz").replace(b"avcC", b"zzzC"))
    return path
