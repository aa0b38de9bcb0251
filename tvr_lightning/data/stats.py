"""Statistics of a dataset: videos, captions and their lengths in tokens, durations, and audio."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Split, SplitName
from tvr_lightning.media.read_many import Unread, read_all
from tvr_lightning.media.video import probe


@dataclass(frozen=True)
class SplitStats:
    """Statistics of one split.

    Attributes:
        split: Videos and captions.
        tokens: Length of every caption in CLIP tokens, including start and end.
        words: Maximum number of tokens; the encoder truncates longer captions.
        seconds: Duration of every readable video; for a video with a span, of the span.
        with_audio: Whether every readable video has an audio track.
    """

    split: Split
    tokens: list[int]
    words: int
    seconds: list[float]
    with_audio: list[bool]

    @property
    def truncated(self) -> float:
        """Share of truncated captions."""
        return sum(length > self.words for length in self.tokens) / max(1, len(self.tokens))

    def row(self) -> dict[str, str]:
        """Return all statistics as text by name."""
        audio = f"{fmean(self.with_audio):.1%}" if self.with_audio else "-"
        return {
            "videos": str(len(self.split.videos)),
            "captions": str(len(self.split.texts)),
            "captions per video": _spread([len(texts) for texts in self.split.texts_of_videos()]),
            "tokens per caption": _spread(self.tokens),
            "truncated captions": f"{self.truncated:.2%} (over {self.words} tokens)",
            "readable files": str(len(self.seconds)),
            "duration": _spread(self.seconds, " s"),
            "with audio track": audio,
            "protocol": self.split.protocol,
        }


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
    infos = {path: info for path, info in zip(files, probed, strict=True) if not isinstance(info, Unread)}
    found = []
    for split in splits:
        readable = [(video.span, infos[video.path]) for video in split.videos if video.path in infos]
        clips = [(span or (0.0, info.duration), info.duration) for span, info in readable]
        seconds = [max(0.0, min(end, duration) - start) for (start, end), duration in clips]
        lengths = [tokens(text.text) for text in split.texts]
        found.append(SplitStats(split, lengths, data.words, seconds, [info.has_audio for _, info in readable]))
    return found


def print_stats(found: Sequence[SplitStats], console: Console | None = None) -> None:
    """Print a table with one column per split."""
    table = Table("", *(each.split.name for each in found))
    columns = [each.row() for each in found]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    (console or Console()).print(table)


def _spread(values: Sequence[float], unit: str = "") -> str:
    """Return the minimum, maximum and mean of the values as text."""
    if not values:
        return "-"
    return f"{round(min(values), 1):g} to {round(max(values), 1):g}{unit}, mean {fmean(values):.1f}{unit}"
