"""Video files: the wanted frames of a clip as pixels, and what a file holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray
from torch import Tensor

from tvr_lightning.data.augment import FrameTransform, ResizeCentreCrop
from tvr_lightning.data.decoder import Pictures, decoded_frames, frames_of_runs, open_video
from tvr_lightning.data.media import VideoError
from tvr_lightning.data.orientation import orientation_of, upright
from tvr_lightning.data.packets import PacketIndex, index_packets, plan_runs
from tvr_lightning.data.sampling import FrameSampling, Positions, sample_frames
from tvr_lightning.data.timeline import Timeline, cut_short, packet_timeline, timeline_of

__all__ = ["DecodedClip", "VideoError", "VideoInfo", "probe", "read_clip"]

Pixels = NDArray[np.uint8]


@dataclass
class DecodedClip:
    """F frames of one clip.

    Attributes:
        pixels: (F, 3, S, S) uint8 RGB; padded frames are zero.
        frame_mask: (F,) bool, True where there is a frame; a repeated last frame counts as one.
        timestamps: (F,) float32, seconds of each frame from the first frame of the file; 0 where padded.
        duration: seconds of the file's video.
    """

    pixels: Tensor
    frame_mask: Tensor
    timestamps: Tensor
    duration: float


@dataclass
class VideoInfo:
    """What a video file holds, read from its packets and its first frame.

    Attributes:
        path: the file.
        duration: seconds from the first frame to the end of the last.
        start: seconds from the container's beginning to the first frame.
        fps: mean frames per second.
        width, height: pixels of a frame as it is shown (rotation applied).
        frames: number of frames.
        keyframes: number of stored frames where decoding can begin.
        has_audio: whether there is a sound track.
        rotation: degrees that the stored frame is turned clockwise to be shown: 0, 90, 180 or 270.
        codec: name of the video codec.
        pixel_format: FFmpeg's name of the stored pixel format.
        broken: why the stream ends before its container says, or None.
    """

    path: Path
    duration: float
    start: float
    fps: float
    width: int
    height: int
    frames: int
    keyframes: int
    has_audio: bool
    rotation: int
    codec: str
    pixel_format: str
    broken: str | None


def read_clip(
    path: str | Path,
    *,
    frames: int,
    image_size: int,
    sampling: FrameSampling = "one-fps-uniform",
    span: tuple[float, float] | None = None,
    generator: np.random.Generator | None = None,
    augment: FrameTransform | None = None,
    threads: int = 1,
) -> DecodedClip:
    """Decode F frames of a clip.

    Only the stretches that lead to a wanted frame are decoded, and only wanted frames are converted to RGB. Rotation
    stored in the file is applied; pixels are taken as square, as OpenCV does for the published results.

    Args:
        path: a video file of any container and codec that FFmpeg reads.
        frames: F.
        image_size: S, pixels.
        sampling: which frames (see `FrameSampling`).
        span: start and end in seconds from the first frame; None is the whole file.
        generator: where `segment-random` draws from.
        augment: from an RGB frame to (S, S), the same for all frames (`draw_augmentation`); None is CLIP's resize and
            centre crop.
        threads: decoding threads; 1 suits many worker processes.

    Returns:
        The frames with their mask and times.

    Raises:
        VideoError: the file is missing, is no video, has no frames in the span, or breaks off before a frame that was
            asked for; a frame is never given in the place of another.
        ValueError: options that do not fit each other (see `sample_frames`).
    """
    path = Path(path)
    convert = partial(_to_pixels, Pictures(), image_size, augment)
    # One draw, so that a second look at the same clip, below, takes the same random frames.
    seed = None if generator is None else int(generator.integers(2**63))
    choose = partial(_choose, path, frames, sampling, span, seed)
    with open_video(path, threads) as (container, stream):
        index = _index(path, container, stream)
        _check_reach(path, container, stream, index, span)
        timeline = packet_timeline(index, stream)
        chosen = choose(timeline)
        images = _decode_planned(path, stream, index, timeline, set(chosen.tolist()), convert)
    if images is None and index.timed and not index.ordered:
        images = _decode_straight(path, set(chosen.tolist()), convert, threads)
    if images is None:
        timeline = _decoded_timeline(path, index, threads)
        chosen = choose(timeline)
        images = _decode_straight(path, set(chosen.tolist()), convert, threads)
    if images is None:
        raise VideoError(path, "does not decode to the same frames twice")
    return _assemble(timeline, chosen, images, frames, image_size)


def probe(path: str | Path) -> VideoInfo:
    """Read what a video file holds; decodes its first frame and no other.

    Args:
        path: a video file.

    Returns:
        Its properties; a file that breaks off is described up to there, with the reason in `broken`.

    Raises:
        VideoError: the file is missing or holds no video that decodes.
    """
    path = Path(path)
    with open_video(path, threads=1) as (container, stream):
        index = _index(path, container, stream)
        timeline = packet_timeline(index, stream)
        first = _first_frame(path, stream, index, timeline)
        orientation = orientation_of(first)
        turned = orientation.quarter_turns % 2 == 1
        count = len(timeline.times)
        began = 0 if container.start_time is None else container.start_time / av.time_base
        origin = int(index.presented()[0]) if index.timed else (stream.start_time or 0)
        return VideoInfo(
            path=path,
            duration=timeline.duration,
            start=max(0.0, float(origin * index.time_base) - began),
            fps=count / timeline.duration if timeline.duration else 0.0,
            width=first.height if turned else first.width,
            height=first.width if turned else first.height,
            frames=count,
            keyframes=int(index.keyframe.sum()),
            has_audio=bool(container.streams.audio),
            rotation=orientation.quarter_turns * 90,
            codec=stream.codec_context.name,
            pixel_format=first.format.name,
            broken=cut_short(path, container, stream, index),
        )


def _to_pixels(picture: Pictures, image_size: int, augment: FrameTransform | None, frame: VideoFrame) -> Pixels:
    """Return a frame upright and transformed, (S, S, 3)."""
    image = upright(picture(frame), orientation_of(frame))
    image = ResizeCentreCrop(image_size)(image) if augment is None else augment(image.convert("RGB"))
    return np.asarray(image)[..., :3]


def _choose(
    path: Path,
    frames: int,
    sampling: FrameSampling,
    span: tuple[float, float] | None,
    seed: int | None,
    timeline: Timeline,
) -> Positions:
    """Return the positions of the wanted frames; a span after the clip's end is the file's fault, so it names it."""
    if span is not None and span[0] >= timeline.duration > 0:
        raise VideoError(path, f"the span {span} begins after its last frame, at {timeline.duration:.3f} s")
    generator = None if seed is None else np.random.default_rng(seed)
    return sample_frames(timeline.times, timeline.duration, frames, sampling, span, generator)


def _index(path: Path, container: InputContainer, stream: VideoStream) -> PacketIndex:
    index = index_packets(container, stream)
    if not index.shown.any():
        raise VideoError(path, f"its video stream has no frames{f' ({index.broken})' if index.broken else ''}")
    return index


def _check_reach(
    path: Path, container: InputContainer, stream: VideoStream, index: PacketIndex, span: tuple[float, float] | None
) -> None:
    """Raise where the wanted span reaches past the place where the stream breaks off."""
    reason = cut_short(path, container, stream, index)
    if reason and (span is None or span[1] > packet_timeline(index, stream).duration):
        raise VideoError(path, reason)


def _decode_planned(
    path: Path,
    stream: VideoStream,
    index: PacketIndex,
    timeline: Timeline,
    positions: set[int],
    convert: Callable[[VideoFrame], Pixels],
) -> dict[int, Pixels] | None:
    """Decode the stretches that lead to the wanted positions.

    Returns:
        The frames by position, or None where one of them did not come out and the file must be decoded straight
        through to learn why (a stream whose packets are no whole frames, a damaged one).
    """
    if timeline.stamps is None:
        return None
    wanted = {int(timeline.stamps[position]): position for position in positions}
    images: dict[int, Pixels] = {}
    try:
        latest: tuple[int, int] | None = None
        for run, frame in frames_of_runs(path, stream, index, plan_runs(index, wanted)):
            # MPEG-4 with two pictures in a packet: the order that frames come in is right, their stamps are not.
            if frame.pts is None or (latest is not None and latest >= (run, frame.pts)):
                return None
            latest = (run, frame.pts)
            if frame.pts in wanted and not frame.is_corrupt:
                images[wanted[frame.pts]] = convert(frame)
    except av.FFmpegError:
        return None
    return images if len(images) == len(wanted) else None


def _decoded_timeline(path: Path, index: PacketIndex, threads: int) -> Timeline:
    """Return the timeline that the decoded frames tell, where that of the packets does not hold."""
    stamps: list[int] = []
    for frame in decoded_frames(path, threads):
        following = stamps[-1] + max(index.last_length, 1) if stamps else 0
        stamps.append(following if frame.pts is None else frame.pts)
    if not stamps:
        raise VideoError(path, "none of its frames can be decoded")
    return timeline_of(np.sort(np.array(stamps, dtype=np.int64)), index, None)


def _decode_straight(
    path: Path, positions: set[int], convert: Callable[[VideoFrame], Pixels], threads: int
) -> dict[int, Pixels] | None:
    """Decode from the beginning and return the frames at the wanted positions, or None where there are fewer frames."""
    last, images = max(positions), {}
    for position, frame in enumerate(decoded_frames(path, threads)):
        if position in positions:
            images[position] = convert(frame)
        if position == last:
            return images
    return None


def _first_frame(path: Path, stream: VideoStream, index: PacketIndex, timeline: Timeline) -> VideoFrame:
    """Decode the first frame alone, or straight from the beginning where its packet cannot be told."""
    if timeline.stamps is not None:
        stamp = int(timeline.stamps[0])
        with suppress(av.FFmpegError):  # what is wrong is told by decoding straight
            for _, frame in frames_of_runs(path, stream, index, plan_runs(index, [stamp])):
                if frame.pts == stamp:
                    return frame
    for frame in decoded_frames(path, threads=1):
        return frame
    raise VideoError(path, "none of its frames can be decoded")


def _assemble(
    timeline: Timeline,
    chosen: Positions,
    images: dict[int, Pixels],
    frames: int,
    image_size: int,
) -> DecodedClip:
    """Stack the chosen frames, padded with zeros up to F where the strategy gives fewer."""
    pixels = np.zeros((frames, image_size, image_size, 3), dtype=np.uint8)
    times = np.zeros(frames, dtype=np.float32)
    for row, position in enumerate(chosen.tolist()):
        pixels[row] = images[position]
        times[row] = timeline.times[position]
    mask = torch.arange(frames) < len(chosen)
    return DecodedClip(
        pixels=torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
        frame_mask=mask,
        timestamps=torch.from_numpy(times),
        duration=timeline.duration,
    )
