"""What a search answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Normalize = Literal["none", "sinkhorn"]
SegmentKind = Literal["shots", "windows", "none"]


@dataclass
class Moment:
    """One frame of a video.

    Attributes:
        time: seconds from the first frame.
        similarity: cosine of the query with the frame, to six places.
    """

    time: float
    similarity: float


@dataclass
class Result:
    """One video that was found.

    Attributes:
        rank: place in the answer, from 1.
        first_rank: place of its best segment among the candidates of the first stage, from 1.
        id: of the video in the index.
        path: the file.
        duration: seconds.
        score: what it is ranked by, the bias included.
        cosine: of the first stage.
        bias: what the normalisation added, None without one.
        sound: how much of the score the sound brought, None where the method does not hear.
        best: frames of the largest similarity, best first; of the best segments, where the video has several.
        moments: frames in the order of time: all of a video that is one segment, else the strongest of each segment
            that was a candidate.
        captions: what the index was told of the video in words, in the order of time.
        width, height: of the video as it is shown, pixels.
        start: seconds where playing begins, the best moment.
        relevance: how much the best segment stands out from what unrelated queries get there, 0 to 1; None where the
            query has no words.
    """

    rank: int
    first_rank: int
    id: str
    path: str
    duration: float
    score: float
    cosine: float
    bias: float | None
    sound: float | None
    best: list[Moment]
    moments: list[Moment]
    captions: list[str] = field(default_factory=list)
    width: int = 0
    height: int = 0
    start: float = 0.0
    relevance: float | None = None


@dataclass
class Answer:
    """What a query gets.

    Attributes:
        query: the text, or what the example is called.
        rerank: the scorer of the second stage, or "none".
        normalize: "sinkhorn" or "none".
        candidates: how many segments of videos the second stage scored.
        videos: how many there are in the index.
        results: best first.
        notes: what the user should know: a cut query, an empty index.
        weak: whether nothing matches well: not even the first result is as relevant as the threshold asks.
        threshold: relevance that a good match has at least; None where the query has no words.
        nearest: largest cosine of the first stage; None where nothing may be found.
    """

    query: str
    rerank: str
    normalize: str
    candidates: int
    videos: int
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weak: bool = False
    threshold: float | None = None
    nearest: float | None = None

    def plain(self) -> dict[str, Any]:
        """Return plain lists, dictionaries, strings and numbers."""
        return asdict(self)


def clock(seconds: float) -> str:
    """Return a time as 1:02:03.4 or 2:03.4."""
    tenths = round(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    head = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{head}:{rest / 10:04.1f}"
