"""Options, source, and report of an extraction."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tvr_lightning.data.readers import MediaReader
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Count, ExtractEngine, FeaturePart, Options, StoreDtype, Workers
from tvr_lightning.store import PARTS, Part, StoreItem


@dataclass
class ExtractOptions(Options):
    """Settings of an extraction, with the defaults of `tvr extract`, which documents them.

    Attributes:
        what: Parts to extract; none or "all" means every part of features that the source and the encoders provide.
        shard_size: Number of items per shard, best a multiple of `batch_size`; if the process is killed, at most one
            shard is lost.
        command: Command line that repeats the extraction, for the messages of the store.
    """

    out: str
    what: Sequence[FeaturePart] = ()
    batch_size: Count = 32
    shard_size: Count = 256
    num_workers: Workers = 2
    dtype: StoreDtype = "float32"
    device: str = "cpu"
    command: str = "tvr extract"
    progress: bool = True
    engine: ExtractEngine = "local"
    actors: Count = 1
    address: str | None = None


@dataclass
class ExtractSource:
    """Videos and texts to extract, and how to read them.

    Attributes:
        videos: Records and store items of the M videos.
        texts: Items of the N texts; empty for a folder of videos.
        read: Reader of one video as in evaluation.
        words: Maximum number of tokens per text W.
        copies: Description of the copies of `tvr data compress` that `read` uses; empty for originals.
    """

    videos: list[tuple[VideoRecord, StoreItem]]
    texts: list[StoreItem]
    read: MediaReader
    words: int = 32
    copies: str = ""


@dataclass
class ExtractReport:
    """Results and timing of an extraction.

    Attributes:
        written: Number of newly written items, by part.
        kept: Number of items that already existed, by part.
        skipped: "path: reason" for each video that could not be read.
        retried: Number of videos that an earlier run skipped and this run tried again, since their files have changed.
        still_skipped: Number of videos that an earlier run skipped and whose files have not changed.
        problems: "path: reason" for each damaged audio track, which was read as far as possible.
        rewritten: Problems of the damaged shards that were rewritten.
        seconds: Total time in seconds.
        spent: Seconds spent waiting for decoded videos, in the encoders, and writing to the disk.
    """

    written: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    retried: int = 0
    still_skipped: int = 0
    problems: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: {"waiting": 0.0, "encoding": 0.0, "writing": 0.0})

    @contextmanager
    def timing(self, step: str) -> Iterator[None]:
        """Add the time spent inside the context to that of a step."""
        began = time.perf_counter()
        yield
        self.spent[step] += time.perf_counter() - began

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        lines = [
            f"{part}: {self.written.get(part, 0)} written, {count} already present" for part, count in self.kept.items()
        ]
        if any(self.written.values()):
            rate = max(self.written.values()) / self.seconds
            shares = ", ".join(f"{step} {seconds / self.seconds:.0%}" for step, seconds in self.spent.items())
            slowest = max(self.spent, key=lambda step: self.spent[step])
            lines.append(f"{rate:.1f} items/s; {shares}; bottleneck: {slowest}")
        if self.retried or self.still_skipped:
            lines.append(
                f"of the previously skipped videos, {self.retried} were tried again and {self.still_skipped} were not, "
                "since their files have not changed"
            )
        lines += [f"rewritten: {problem}" for problem in self.rewritten]
        lines += [f"skipped: {reason}" for reason in self.skipped]
        return lines + [f"damaged audio: {problem}" for problem in self.problems]


def parts_of(
    what: Sequence[FeaturePart], source: ExtractSource, encoder: Encoder, audio_encoder: AudioEncoder | None
) -> list[Part]:
    """Return the parts to extract, in a fixed order.

    Raises:
        UserError: The source or the encoders cannot provide a part that was requested by name.
    """
    missing: dict[str, str] = {}
    if not source.texts:
        missing["text"] = "there are no texts. Pass the --config of a dataset."
    if not encoder.gives_patches:
        missing["patches"] = f"{type(encoder).__name__} provides none"
    if audio_encoder is None or source.read.audio is None:
        missing["audio"] = (
            "there is no audio encoder, or the data has no audio. Set model.init_args.audio_encoder and "
            "data.init_args.audio."
        )
    for part in what:
        if part in missing:
            raise UserError(f"--parts {part}: {missing[part]}")
    # Pixels are not features and take the most space, so they are extracted only by name.
    every = {*PARTS} - {"pixels", *missing} if not what or "all" in what else set()
    return [part for part in PARTS if part in what or part in every]
