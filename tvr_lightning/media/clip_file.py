"""A video file whose frames are decoded when a model selects them."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.media.container import VideoError
from tvr_lightning.media.reader import Timeline, open_reader
from tvr_lightning.media.sampling import Span


class ClipFile:
    """Video file, or a span of it in seconds, with the interface of torchcodec's decoders that MTEB's models use.

    `metadata` has the number of frames (`num_frames`) and the duration in seconds (`end_stream_seconds`).

    Raises:
        VideoError: The file is not a video, or it ends early.
    """

    def __init__(self, path: Path, span: Span | None = None) -> None:
        self._path = path  # models get no names
        with open_reader(path) as video:
            if video.broken:
                raise VideoError(path, video.broken)
            times = video.timeline.times
            duration = video.timeline.duration
        start, end = span or (0.0, duration)
        inside = np.flatnonzero((times - times[0] >= start) & (times - times[0] < end))
        if not len(inside):
            raise VideoError(path, f"there is no frame from {start} to {end} s")
        self._first = int(inside[0])
        self.metadata = SimpleNamespace(num_frames=len(inside), end_stream_seconds=min(end, duration) - start)

    def get_frames_at(self, indices: Sequence[int]) -> SimpleNamespace:
        """Decode the frames at K indices, which can repeat; `data` is (K, 3, H, W) uint8."""
        positions = [self._first + int(index) for index in indices]

        def choose(timeline: Timeline) -> list[int]:
            return [min(position, len(timeline.times) - 1) for position in positions]

        with open_reader(self._path) as video:
            images = dict(video.frames(choose, np.array))
            found = [images[position] for position in choose(video.timeline)]
        return SimpleNamespace(data=torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).contiguous())


class DecodedFrames:
    """Frames (K, 3, H, W) uint8 in memory with the same interface, such as those that an index reads."""

    def __init__(self, pixels: Tensor, seconds: float) -> None:
        if not len(pixels):
            raise UserError("A clip needs at least one frame.")
        self._pixels = pixels
        self.metadata = SimpleNamespace(num_frames=len(pixels), end_stream_seconds=seconds)

    def get_frames_at(self, indices: Sequence[int]) -> SimpleNamespace:
        """Return the frames at K indices, which can repeat; `data` is (K, 3, H, W) uint8."""
        return SimpleNamespace(data=self._pixels[list(indices)])
