"""Answers of a search, and their parts as text."""

from dataclasses import dataclass, field
from typing import Literal
from unicodedata import category

Normalize = Literal["none", "sinkhorn"]
SegmentKind = Literal["shots", "windows", "none"]


@dataclass
class Moment:
    """One frame of a video: seconds from the first frame, and cosine with the query, rounded to six places."""

    time: float
    similarity: float


@dataclass
class Result:
    """One video that was found.

    Attributes:
        score: Score that determines the rank, including the bias.
        cosine: Cosine of the first stage.
        best: Frames with the largest similarity, best first.
        moments: Frames in the order of time: all frames of a video with one segment, otherwise the most similar frame
            of each candidate segment.
        start: Time of the best moment in seconds.
        relevance: Share of unrelated queries whose best match would be weaker, 0 to 1. None without text.
    """

    rank: int
    id: str
    path: str
    duration: float
    score: float
    cosine: float
    bias: float | None
    best: list[Moment]
    moments: list[Moment]
    captions: list[str]
    width: int
    height: int
    start: float
    relevance: float | None = None


@dataclass
class Answer:
    """Result of a search query.

    Attributes:
        rerank: Scorer of the second stage, "none", or "frames" for an example.
        candidates: Number of segments that the second stage scored.
        notes: Sentences for the user, for example about a query that was cut.
        weak: Whether no candidate reaches the minimum relevance, 0.9 by default.
    """

    query: str
    rerank: str
    normalize: str
    candidates: int
    videos: int
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weak: bool = False


def clock(seconds: float) -> str:
    """Return a time as 1:02:03.4 or 2:03.4."""
    minutes, tenths = divmod(round(seconds * 10), 600)
    hours, minutes = divmod(minutes, 60)
    head = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{head}:{tenths / 10:04.1f}"


def printable(text: str) -> str:
    """Escape control characters, which a terminal would obey, and bytes of file names that are not UTF-8."""
    return "".join(c.encode("unicode_escape").decode() if category(c) in ("Cc", "Cs") else c for c in text)
