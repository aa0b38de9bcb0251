"""A long video read segment by segment, as its methods take them; the memory that it takes does not grow with it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tvr_lightning.data.audio_alignment import add_sound
from tvr_lightning.data.batch import Media
from tvr_lightning.media.sampling import Declared, sample_frames
from tvr_lightning.media.steady import SteadyFrame, steady_frames
from tvr_lightning.media.video import DecodedClip
from tvr_lightning.search.pictures import thumbnail
from tvr_lightning.search.scorer import Clip, Scorer
from tvr_lightning.search.segments import RATE, ChangeFrame, Frame, Segment, Segments, cut

PICTURE_EVERY = 4
"""Of the frames that are looked at, every which is kept as a small picture."""


@dataclass
class SegmentClips:
    """One segment as read.

    Attributes:
        start, end: seconds from the video's first frame.
        clips: by scorer; times count from the video's first frame.
        pictures: JPEG by time, of what the segments before did not show.
    """

    start: float
    end: float
    clips: dict[str, Clip]
    pictures: dict[float, bytes]


class LongVideo:
    """Reads one video in segments.

    Args:
        path: the file.
        models: scorers by name.
        how: the segments.

    Attributes:
        size: width and height of its pictures, once it was read.
        end: seconds that it lasts, once it was read.
    """

    def __init__(self, path: Path, models: dict[str, Scorer], how: Segments) -> None:
        self.path, self.models, self.how = path, models, how
        self.ways = list(dict.fromkeys(model.preparation for model in models.values()))
        self.size, self.end = (0, 0), 0.0
        self._seen = 0

    def segments(self) -> Iterator[SegmentClips]:
        """Yield all segments in the order of time."""
        for segment in cut(self._frames(), self.how):
            yield self._read(segment)

    def _frames(self) -> Generator[SteadyFrame[Frame], None, None]:
        self.end = yield from steady_frames(self.path, RATE, self._look)

    def _look(self, picture: Image.Image) -> Frame:
        self.size = picture.size
        jpeg = thumbnail(picture) if self._seen % PICTURE_EVERY == 0 else None
        self._seen += 1
        return Frame(ChangeFrame(picture), [way(picture) for way in self.ways], jpeg)

    def _read(self, segment: Segment[Frame]) -> SegmentClips:
        read: dict[tuple[object, ...], Clip] = {}
        for model in self.models.values():
            if model.reading not in read:
                read[model.reading] = self._clip(segment, model)
        frames = segment.frames[len(segment.frames) - segment.new :]
        pictures = {frame.time: frame.content.jpeg for frame in frames if frame.content.jpeg is not None}
        clips = {name: read[model.reading] for name, model in self.models.items()}
        return SegmentClips(segment.start, segment.end, clips, pictures)

    def _clip(self, segment: Segment[Frame], model: Scorer) -> Clip:
        length, frames = segment.end - segment.start, model.module.frames
        moments = np.array([frame.time for frame in segment.frames]) - segment.start
        chosen = sample_frames(moments, length, frames, model.sampling, declared=Declared(RATE, len(moments)))
        way = self.ways.index(model.preparation)
        squares = np.stack([segment.frames[place].content.squares[way] for place in chosen.tolist()])
        prepared = torch.from_numpy(squares).permute(0, 3, 1, 2)
        pixels = prepared.new_zeros(frames, *prepared.shape[1:])
        pixels[: len(chosen)] = prepared
        times, mask = torch.zeros(frames), torch.arange(frames) < len(chosen)
        times[: len(chosen)] = torch.from_numpy(moments[chosen] + segment.start).float()
        media = Media(pixels[None], mask[None], duration=torch.tensor([length], dtype=torch.float32))
        if model.audio is not None:
            whole = DecodedClip(pixels, mask, times, segment.end)
            add_sound(media, self.path, (segment.start, segment.end), whole, model.audio, "skip")
        return Clip(media, times)
