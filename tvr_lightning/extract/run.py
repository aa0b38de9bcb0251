"""Extraction: runs frozen encoders over a dataset or a folder of videos and writes the features to a store."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.extract.batches import Models, PartBatch, read_batches, start_inference
from tvr_lightning.extract.fingerprint import fingerprints
from tvr_lightning.extract.plan import ExtractOptions, ExtractSource, parts_of
from tvr_lightning.features import TextFeatures
from tvr_lightning.option_types import FeaturePart
from tvr_lightning.progress import progress_bar
from tvr_lightning.store import StoreItem, StoreWriter
from tvr_lightning.store.feature_store import file_mark, is_same_file


@dataclass
class ExtractReport:
    """Numbers of items by part, skipped videos, and seconds of an extraction."""

    rewritten: list[str]  # problems of the damaged shards
    written: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)  # "path: reason" for each video that could not be read
    retried: int = 0  # videos that an earlier run skipped and whose files have changed
    still_skipped: int = 0  # videos that an earlier run skipped and whose files have not changed
    problems: list[str] = field(default_factory=list)  # "path: reason" for each partly damaged audio track
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
        lines = [f"{part}: {self.written.get(part, 0)} written, {n} already present" for part, n in self.kept.items()]
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


@torch.no_grad()
def extract(
    source: ExtractSource,
    encoder: Encoder,
    audio_encoder: AudioEncoder | None,
    options: ExtractOptions,
    bar: AbstractContextManager[Progress] | None = None,
) -> ExtractReport:
    """Write the features of a source to a store; a rerun keeps those of unchanged files.

    Videos that an earlier run skipped are tried again if their files have changed. `bar` replaces the progress bar.

    Raises:
        StoreError: The store has other settings, another process is writing it, or the disk is full.
    """
    began = time.perf_counter()
    models = (encoder, audio_encoder)
    start_inference(models, options.device)
    parts = parts_of(options.what, source, encoder, audio_encoder)
    made = fingerprints(source, encoder, audio_encoder, parts)
    with (
        StoreWriter.open(options.out, made, options.command, options.dtype) as writer,
        bar or progress_bar(options.progress) as progress,
    ):
        report = ExtractReport(writer.rewritten)
        run = _Extraction(source, models, options, writer, report, progress)
        if "text" in parts:
            run.texts()
        run.videos([part for part in parts if part != "text"])
    report.seconds = time.perf_counter() - began
    return report


@dataclass
class _Extraction:
    """One run that reads, encodes, and writes shard by shard."""

    source: ExtractSource
    models: Models
    options: ExtractOptions
    writer: StoreWriter
    report: ExtractReport
    progress: Progress

    def texts(self) -> None:
        """Encode and write the texts that are missing in the store."""
        unique = list({item.key: item for item in self.source.texts}.values())
        missing = [item for item in unique if item.key not in self.writer.parts["text"].places]
        self.report.kept["text"] = len(unique) - len(missing)
        task = self.progress.add_task("texts", total=len(unique), completed=len(unique) - len(missing))
        for items in _chunks(missing, self.options.shard_size):
            features = []
            for batch in _chunks(items, self.options.batch_size):
                with self.report.timing("encoding"):
                    encoded = self.models[0].encode_text([str(item.text) for item in batch], self.source.words)
                    features.append(encoded.to("cpu"))
                self.progress.advance(task, len(batch))
            text = TextFeatures.cat(features)
            self._append("text", items, {"sentence": text.sentence, "words": text.words}, text.word_mask)

    def videos(self, parts: Sequence[FeaturePart]) -> None:
        """Decode, encode, and write the videos that are missing in a part of the store."""
        videos = list({item.key: (record, item) for record, item in self.source.videos}.values())
        stored = {part: self.writer.parts[part] for part in parts}
        missing: dict[int, tuple[FeaturePart, ...]] = {}
        self.report.kept.update(dict.fromkeys(parts, 0))
        for i, (record, item) in enumerate(videos):
            lacking = tuple(part for part in parts if not self._is_done(part, item))
            for part in parts:
                self.report.kept[part] += part not in lacking and item.key in stored[part].places
            if any(item.key in index.skipped for index in stored.values()):
                self.report.retried += bool(lacking)
                self.report.still_skipped += not lacking
            if lacking:  # marked before reading, so that a file that changes during the run is read again later
                videos[i] = (record, dataclasses.replace(item, file=file_mark(Path(item.path))))
                missing[i] = lacking
        shards = [
            (lacking, list(_chunks(shard, self.options.batch_size)))
            for lacking, group in groupby(missing, key=lambda i: missing[i])
            for shard in _chunks(list(group), self.options.shard_size)
        ]
        if not shards:
            return
        task = self.progress.add_task("videos", total=len(videos), completed=len(videos) - len(missing))
        groups = [(lacking, group) for lacking, batches in shards for group in batches]
        encoded = read_batches([record for record, _ in videos], groups, self.source.read, self.models, self.options)
        for lacking, batches in shards:
            features: dict[FeaturePart, list[PartBatch]] = {part: [] for part in lacking}
            read: list[StoreItem] = []
            failed: list[tuple[StoreItem, str]] = []
            for group in batches:
                with self.report.timing("waiting"):
                    batch = next(encoded)
                with self.report.timing("encoding"):
                    batch.encode(lacking, self.models, self.options.device)
                items = [videos[i][1] for i in group]
                read += [item for place, item in enumerate(items) if place not in batch.failed]
                failed += [(items[place], reason) for place, reason in batch.failed.items()]
                self.report.problems += batch.problems
                for part in lacking if batch.features else ():
                    features[part].append(batch.features[part])
                self.progress.advance(task, len(group))
            self.report.skipped += [f"{item.path}: {reason}" for item, reason in failed]
            for part, found in features.items():
                # Without a readable video, the shard records only the skipped ones.
                joined = PartBatch.cat(found or [PartBatch(torch.zeros(0), torch.zeros(0))])
                times = {} if joined.times is None else {"times": joined.times}
                self._append(part, read, {part: joined.values, **times}, joined.mask, failed)

    def _is_done(self, part: FeaturePart, item: StoreItem) -> bool:
        """Return whether a part contains or skipped a video whose file is unchanged.

        For a skipped file, the digest is not enough: a repair may have changed bytes that it does not cover.
        """
        stored = self.writer.parts[part]
        file = Path(item.path)
        if item.key in stored.places:
            return not file.is_file() or is_same_file(file, stored.marks[item.key])
        return item.key in stored.skipped and file_mark(file) == stored.marks[item.key]

    def _append(self, part: FeaturePart, items: Sequence[StoreItem], *content: Any) -> None:
        with self.report.timing("writing"):
            self.writer.append(part, items, *content)
        self.report.written[part] = self.report.written.get(part, 0) + len(items)


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
