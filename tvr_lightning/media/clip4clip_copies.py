"""Frames of the copies that CLIP4Clip's `preprocess/compress_video.py` makes with FFmpeg.

It runs `ffmpeg -i IN -filter:v scale='if(gt(a,1),trunc(oh*a/2)*2,224)':'if(gt(a,1),224,trunc(ow*a/2)*2)' -map 0:v -r 3
OUT`. The rate comes from FFmpeg's constant-rate video sync and not from its `fps` filter: after the first two frames, a
copy shows the frames of the original with a lag of about 0.4 s.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from fractions import Fraction
from math import copysign, floor
from pathlib import Path
from typing import cast

from av.container import Flags, OutputContainer
from av.video.frame import PictureType, VideoFrame
from av.video.reformatter import VideoReformatter

from tvr_lightning.media.container import MAX_SECONDS, TimeBudget, VideoError, open_video, packets_of
from tvr_lightning.media.decoder import check_shape, frames_in_order, orientation_of, upright_image

FPS, SIZE = 3, 224
_STEPS = 2**16  # subdivisions of an output frame's duration to which FFmpeg rounds timestamps


def write_clip4clip_frames(path: Path, out: OutputContainer) -> int:
    """Encode the frames of a copy with x264's default quality, as FFmpeg does, and return their number."""
    stream = out.add_stream("libx264", rate=FPS, options={"crf": "23", "preset": "medium"})
    stream.pix_fmt = "yuv420p"
    stream.codec_context.thread_count = 1
    reformatter = VideoReformatter()
    count = 0
    with closing(constant_rate_frames(path, FPS)) as frames:
        for frame in frames:
            if orientation_of(frame) is not None:
                frame = VideoFrame.from_image(upright_image(path, reformatter, frame))
            if not count:
                stream.width, stream.height = clip4clip_size(frame.width, frame.height)
            size = (stream.width, stream.height)
            scaled = reformatter.reformat(frame, *size, format="yuv420p", interpolation="BICUBIC", threads=1)
            scaled.pts = count
            scaled.time_base = Fraction(1, FPS)
            scaled.duration = 1
            scaled.pict_type = PictureType.NONE
            out.mux(stream.encode(scaled))
            count += 1
    out.mux(stream.encode(None))
    return count


def clip4clip_size(width: int, height: int) -> tuple[int, int]:
    """Return the size of a copy. As in the command, portrait videos are squashed to less than a width of 224."""
    aspect = width / height
    length = int(SIZE * aspect / 2) * 2
    return (length, SIZE) if aspect > 1 else (SIZE, length)


def constant_rate_frames(path: Path, rate: int) -> Generator[VideoFrame, None, None]:
    """Yield the frames that `ffmpeg -r RATE` writes, one per output frame (`-fps_mode cfr`).

    A frame that starts and ends more than 1.1 output frames too early is dropped; one that ends more than 1.1 too late
    is repeated. At the end, the last frame is repeated; the number of repetitions is the median of the last three.
    """
    written = 0
    repeats = deque([0, 0, 0], 3)
    previous = None
    with open_video(path) as (container, stream):
        container.flags &= ~cast(int, Flags.gen_pts.value)  # PyAV's default; the FFmpeg command has no such timestamps
        origin = Fraction(container.start_time or 0, 10**6)
        guessed = stream.guessed_rate or Fraction(25)
        budget = TimeBudget(path)
        for frame, time in _timed(frames_in_order(stream, packets_of(container, budget, stream), budget)):
            check_shape(path, frame)
            if time - origin > MAX_SECONDS:
                raise VideoError(path, f"lasts longer than {MAX_SECONDS:,} s by its time stamps")
            position = floor((time - origin) * rate * _STEPS + Fraction(1, 2)) / _STEPS
            if position != round(position):  # FFmpeg moves timestamps off midpoints
                position += copysign(0.5 / _STEPS, position)
            base = frame.time_base or Fraction(1)
            length = float((frame.duration or round(1 / guessed / base)) * base) * rate
            early = position - written
            earlier = 0
            count = 1
            end = early + length
            if end < -1.1:
                count = 0
            elif end > 1.1:
                count = round(end)
                earlier = min(round(early - 0.6), count) if early > 1.1 else 0
            repeats.appendleft(earlier)
            yield from [previous or frame] * earlier
            yield from [frame] * (count - earlier)
            written = written + count
            previous = frame
    if previous is None:
        raise VideoError(path, "none of its frames can be decoded")
    yield from [previous] * sorted(repeats)[1]


def _timed(frames: Iterable[VideoFrame]) -> Iterator[tuple[VideoFrame, Fraction]]:
    """Yield frames with their times in seconds, as libavcodec estimates them.

    Decoding timestamps replace presentation timestamps that are missing or that decrease more often (AVI files).
    """
    latest = [float("-inf")] * 2
    faults = [0, 0]
    after = 0
    for frame in frames:
        stamps = (frame.pts, frame.dts)
        for kind, stamp in enumerate(stamps):
            known = stamp if stamp is not None else stamps[1 - kind]
            if known is not None:
                faults[kind] += stamp is not None and known <= latest[kind]
                latest[kind] = known
        shown = frame.pts if frame.dts is None or faults[0] <= faults[1] else None
        shown = next((stamp for stamp in (shown, frame.dts) if stamp is not None), after)
        after = shown + frame.duration
        yield frame, shown * (frame.time_base or Fraction(1))
