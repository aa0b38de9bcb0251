"""Statistics of a dataset: videos, captions and their lengths in tokens, durations, and audio."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import SplitName
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.read_many import read_all
from tvr_lightning.media.video import probe


def stats(data: TextVideoDataModule, tokens: Callable[[str], int], workers: int = 1) -> dict[str, dict[str, str]]:
    """Return the statistics of the splits of a dataset as text: train, val (unless it is the test split), test.

    `tokens` returns the number of tokens of a caption, including start and end. The duration of a video with a span is
    that of the span.
    """
    data.check_present()
    names: list[SplitName] = ["train", "test"] if data.validation == "test" else ["train", "val", "test"]
    splits = [data.read_split(name) for name in names]
    files = list(dict.fromkeys(video.path for split in splits for video in split.videos))
    probed = read_all(files, probe, workers=workers, title=f"reading {data.title}")
    infos = {path: info for path, info in zip(files, probed, strict=True) if not isinstance(info, MediaError)}
    words = data.words
    found: dict[str, dict[str, str]] = {}
    for split in splits:
        readable = [(video.span, infos[video.path]) for video in split.videos if video.path in infos]
        clips = [(span or (0.0, info.duration), info.duration) for span, info in readable]
        seconds = [max(0.0, min(end, duration) - start) for (start, end), duration in clips]
        lengths = [tokens(text.text) for text in split.texts]
        found[split.name] = {
            "videos": str(len(split.videos)),
            "captions": str(len(split.texts)),
            "captions per video": _spread([len(texts) for texts in split.texts_of_videos()]),
            "tokens per caption": _spread(lengths),
            "truncated captions": f"{fmean(n > words for n in lengths):.2%} (over {words} tokens)",
            "readable files": str(len(readable)),
            "duration": _spread(seconds, " s"),
            "with audio track": f"{fmean(info.has_audio for _, info in readable):.1%}" if readable else "-",
            "protocol": split.protocol,
        }
    return found


def print_stats(found: Mapping[str, Mapping[str, str]]) -> None:
    """Print a table with one column per split."""
    table = Table("", *found)
    for name in next(iter(found.values())):
        table.add_row(name, *(column[name] for column in found.values()))
    Console().print(table)


def _spread(values: Sequence[float], unit: str = "") -> str:
    """Return the minimum, maximum and mean of the values as text."""
    if not values:
        return "-"
    return f"{round(min(values), 1):g} to {round(max(values), 1):g}{unit}, mean {fmean(values):.1f}{unit}"
