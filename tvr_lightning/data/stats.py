"""Statistics of a dataset: videos, captions and their lengths in tokens, durations, and audio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Split, SplitName
from tvr_lightning.media.read_many import Unread, read_all
from tvr_lightning.media.video import VideoInfo, probe


@dataclass(frozen=True)
class Spread:
    """Minimum, mean and maximum of a list of values."""

    least: float
    mean: float
    greatest: float

    @classmethod
    def of(cls, values: list[int] | list[float]) -> Spread | None:
        """Return the spread of the values; None if there are none."""
        return cls(float(min(values)), float(np.mean(values)), float(max(values))) if values else None


@dataclass(frozen=True)
class SplitStats:
    """Statistics of one split.

    Attributes:
        name: Name of the split.
        protocol: Protocol of the split.
        videos: Number of videos.
        texts: Number of captions.
        captions_per_video: Spread of the number of captions per video.
        tokens: Spread of caption lengths in CLIP tokens, including start and end.
        truncated: Share of captions longer than `words`, which the encoder truncates.
        words: Configured maximum number of tokens.
        readable: Number of videos with a readable file, to which `seconds` and `with_audio` refer.
        seconds: Spread of durations; for a video with a span, the duration of the span.
        with_audio: Share of videos with an audio track; None if no video is readable.
    """

    name: str
    protocol: str
    videos: int
    texts: int
    captions_per_video: Spread | None
    tokens: Spread | None
    truncated: float
    words: int
    readable: int
    seconds: Spread | None
    with_audio: float | None


def stats(
    data: TextVideoDataModule, tokens: Callable[[str], int], *, workers: int = 1, progress: bool = True
) -> list[SplitStats]:
    """Return the statistics of the splits of a dataset: train, val (unless it is the test split), test.

    `tokens` returns the number of tokens of a caption, including start and end.
    """
    data.check_present()
    names: list[SplitName] = ["train", "test"] if data.validation == "test" else ["train", "val", "test"]
    splits = [data.read_split(name) for name in names]
    files = list(dict.fromkeys(video.path for split in splits for video in split.videos))
    probed = read_all(files, probe, workers=workers, title=f"reading {data.title}", progress=progress)
    found = {path: info for path, info in zip(files, probed, strict=True) if not isinstance(info, Unread)}
    return [_describe(split, data.words, found, tokens) for split in splits]


def _describe(split: Split, words: int, found: dict[Path, VideoInfo], tokens: Callable[[str], int]) -> SplitStats:
    lengths = [tokens(text.text) for text in split.texts]
    readable = [(video, found[video.path]) for video in split.videos if video.path in found]
    seconds = []
    for video, info in readable:
        start, end = video.span or (0.0, info.duration)
        seconds.append(max(0.0, min(end, info.duration) - start))
    return SplitStats(
        name=split.name,
        protocol=split.protocol,
        videos=len(split.videos),
        texts=len(split.texts),
        captions_per_video=Spread.of([len(texts) for texts in split.texts_of_videos()]),
        tokens=Spread.of(lengths),
        truncated=sum(length > words for length in lengths) / max(1, len(lengths)),
        words=words,
        readable=len(readable),
        seconds=Spread.of(seconds),
        with_audio=sum(info.has_audio for _, info in readable) / len(readable) if readable else None,
    )


def print_stats(splits: list[SplitStats], console: Console | None = None) -> None:
    """Print a table with one column per split."""
    table = Table("", *(f"{split.name}" for split in splits))
    rows: list[tuple[str, list[str]]] = [
        ("videos", [str(split.videos) for split in splits]),
        ("captions", [str(split.texts) for split in splits]),
        ("captions per video", [_spread(split.captions_per_video, "") for split in splits]),
        ("tokens per caption", [_spread(split.tokens, "") for split in splits]),
        ("truncated captions", [f"{split.truncated:.2%} (over {split.words} tokens)" for split in splits]),
        ("readable files", [str(split.readable) for split in splits]),
        ("duration", [_spread(split.seconds, " s") for split in splits]),
        ("with audio track", ["-" if s.with_audio is None else f"{s.with_audio:.1%}" for s in splits]),
        ("protocol", [split.protocol for split in splits]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    (console or Console()).print(table)


def _spread(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return "-"
    return f"{round(spread.least, 1):g} to {round(spread.greatest, 1):g}{unit}, mean {spread.mean:.1f}{unit}"
