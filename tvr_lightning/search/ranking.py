"""How segments that were scored become an answer: one result per video, with its best moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.features import VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.search.catalog import SpanRow
from tvr_lightning.search.results import Moment

BEST_MOMENTS = 3
APART = 1.0
"""Seconds by which the best moments of a video differ at least, where it has others."""
SEGMENTS_OF_AN_EXAMPLE = 16


@dataclass(frozen=True)
class Example:
    """Something that videos are compared with.

    Attributes:
        name: what it is called.
        features: of its segments, frames (n, F, D).
        video: its id where it is a video of the index, which then is no result.
    """

    name: str
    features: VideoFeatures
    video: str | None = None

    def segments(self) -> list[Tensor]:
        """Return the real frames (K, D) of length 1 of each of its segments; of a long one some at equal steps."""
        count = len(self.features.frames)
        places = torch.linspace(0, count - 1, min(count, SEGMENTS_OF_AN_EXAMPLE)).round().long().tolist()
        return [unit(self.features.frames[place][self.features.frame_mask[place]]) for place in places]


@dataclass
class VideoMatch:
    """A video with its segments that were scored.

    Attributes:
        places: of its segments among all that were scored, best first.
        score: of the best one.
    """

    places: list[int]
    score: float


def by_video(rows: Sequence[SpanRow], scores: Tensor) -> dict[str, VideoMatch]:
    """Group segments with scores (S,) by video, best first; equal scores keep the order that they came in."""
    found: dict[str, VideoMatch] = {}
    for place in scores.sort(descending=True, stable=True).indices.tolist():
        video = rows[place].video.id
        found.setdefault(video, VideoMatch([], float(scores[place]))).places.append(place)
    return found


def likeness(example: Tensor, frames: Tensor) -> Tensor:
    """Return for each of the frames (F, D) its best cosine with a frame of the example (K, D), transposed: (K, F)."""
    return example @ unit(frames).T


def likeness_to(segments: Sequence[Tensor], frames: Tensor) -> Tensor:
    """Return the likeness of a segment with frames (F, D) to the most similar segment (K, D) of an example."""
    return torch.stack([likeness(segment, frames).amax(1).mean() for segment in segments]).amax()


def best_of(moments: Sequence[Moment]) -> list[Moment]:
    """Return the strongest moments, best first, not all of them of the same second."""
    chosen: list[Moment] = []
    ordered = sorted(moments, key=lambda moment: -moment.similarity)
    for moment in ordered:
        if all(abs(moment.time - other.time) >= APART for other in chosen):
            chosen.append(moment)
        if len(chosen) == BEST_MOMENTS:
            break
    rest = [moment for moment in ordered if moment not in chosen]
    return chosen + rest[: BEST_MOMENTS - len(chosen)]


def strongest_of_each(segments: Sequence[list[Moment]]) -> list[Moment]:
    """Return the moments of a video in the order of time: all of a single segment, the strongest of each of several."""
    if len(segments) == 1:
        return segments[0]
    strongest = [max(moments, key=lambda moment: moment.similarity) for moments in segments if moments]
    return sorted(strongest, key=lambda moment: moment.time)
