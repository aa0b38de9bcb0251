"""Extraction: runs frozen encoders over a dataset or a folder of videos and writes the features to a store."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.extract.batch import ExtractBatch, encode, join
from tvr_lightning.extract.cluster import encoded_by_ray
from tvr_lightning.extract.fingerprint import fingerprints
from tvr_lightning.extract.plan import ExtractOptions, ExtractReport, ExtractSource, parts_of
from tvr_lightning.features import TextFeatures
from tvr_lightning.media.read_many import read_many
from tvr_lightning.progress import progress_bar
from tvr_lightning.store import Part, StoreItem, StoreWriter, file_mark, is_same_file


@contextmanager
def frozen(device: str, *models: nn.Module | None) -> Iterator[None]:
    """Run models on a device, in eval mode and without gradients, and restore their modes afterwards."""
    present = [model.to(device) for model in models if model is not None]
    modes = [model.training for model in present]
    try:
        for model in present:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for model, mode in zip(present, modes, strict=True):
            model.train(mode)


def extract(
    source: ExtractSource,
    encoder: Encoder,
    audio_encoder: AudioEncoder | None,
    options: ExtractOptions,
    bar: AbstractContextManager[Progress] | None = None,
) -> ExtractReport:
    """Write the features of a source to a store. Stored features of unchanged files are kept; rerun it after a kill.

    Videos that an earlier run skipped are tried again if their files have changed. `bar` replaces the progress bar.

    Raises:
        StoreError: The store has other settings, another process is writing it, or the disk is full.
    """
    began = time.perf_counter()
    parts = parts_of(options.what, source, encoder, audio_encoder)
    made = fingerprints(source, encoder, audio_encoder, parts)
    with (
        frozen(options.device, encoder, audio_encoder),
        StoreWriter(options.out, made, options.command, options.dtype) as writer,
    ):
        report = ExtractReport(rewritten=writer.rewritten)
        run = _Extraction(source, encoder, audio_encoder, options, writer, report)
        with bar or progress_bar(options.progress) as progress:
            if "text" in parts:
                run.texts(progress)
            run.videos([part for part in parts if part != "text"], progress)
    report.seconds = time.perf_counter() - began
    return report


@dataclass
class _Extraction:
    """One run that reads, encodes, and writes shard by shard."""

    source: ExtractSource
    encoder: Encoder
    audio_encoder: AudioEncoder | None
    options: ExtractOptions
    writer: StoreWriter
    report: ExtractReport

    def texts(self, progress: Progress) -> None:
        """Encode and write the texts that are missing in the store."""
        unique = list({item.key: item for item in self.source.texts}.values())
        missing = [item for item in unique if item.key not in self.writer.parts["text"].places]
        self.report.kept["text"] = len(unique) - len(missing)
        task = progress.add_task("texts", total=len(unique), completed=len(unique) - len(missing))
        for items in _chunks(missing, self.options.shard_size):
            features = []
            for batch in _chunks(items, self.options.batch_size):
                with self.report.timing("encoding"):
                    features.append(self.encoder.encode_text([str(x.text) for x in batch], self.source.words).to("cpu"))
                progress.advance(task, len(batch))
            text = TextFeatures.cat(features)
            self._append("text", items, {"sentence": text.sentence, "words": text.words}, text.word_mask)

    def videos(self, parts: Sequence[Part], progress: Progress) -> None:
        """Decode, encode, and write the videos that are missing in a part of the store."""
        videos = list({item.key: (record, item) for record, item in self.source.videos}.values())
        missing = [tuple(part for part in parts if not self._is_done(part, item)) for _, item in videos]
        for part in parts:
            places = self.writer.parts[part].places
            self.report.kept[part] = sum(
                part not in lacking and item.key in places for lacking, (_, item) in zip(missing, videos, strict=True)
            )
        for i, (record, item) in enumerate(videos):
            if any(item.key in self.writer.parts[part].skipped for part in parts):
                self.report.retried += bool(missing[i])
                self.report.still_skipped += not missing[i]
            if missing[i]:  # marked before reading, so that a file that changes during the run is read again later
                videos[i] = (record, dataclasses.replace(item, file=file_mark(item.path)))
        unfinished = [i for i, lacking in enumerate(missing) if lacking]
        shards = [
            (lacking, list(_chunks(chunk, self.options.batch_size)))
            for lacking, group in groupby(unfinished, key=lambda i: missing[i])
            for chunk in _chunks(list(group), self.options.shard_size)
        ]
        if not shards:
            return
        task = progress.add_task("videos", total=len(videos), completed=len(videos) - len(unfinished))
        groups = [(lacking, group) for lacking, batches in shards for group in batches]
        encoded = self._batches([record for record, _ in videos], groups)
        for lacking, batches in shards:
            features: dict[Part, list[tuple[Tensor, Tensor]]] = {part: [] for part in lacking}
            read: list[StoreItem] = []
            failed: list[tuple[StoreItem, str]] = []
            for group in batches:
                with self.report.timing("waiting"):
                    batch = next(encoded)
                with self.report.timing("encoding"):
                    encode(batch, lacking, self.encoder, self.audio_encoder, self.options.device)
                read += [videos[group[i]][1] for i in batch.read]
                failed += [(videos[group[i]][1], reason) for i, reason in batch.failed]
                self.report.problems += batch.problems
                for part in lacking if batch.read else ():
                    features[part].append(batch.features[part])
                progress.advance(task, len(group))
            self.report.skipped += [f"{item.path}: {reason}" for item, reason in failed]
            for part, pairs in features.items():
                # Without a readable video, the shard records only the skipped ones.
                values, mask = map(torch.cat, zip(*pairs or [(torch.zeros(0), torch.zeros(0))], strict=True))
                self._append(part, read, {part: values}, mask, failed)

    def _batches(
        self, records: list[VideoRecord], groups: list[tuple[tuple[Part, ...], list[int]]]
    ) -> Iterator[ExtractBatch]:
        """Yield the batches, read by worker processes or read and encoded by Ray."""
        read = self.source.read
        if self.options.engine == "ray":
            return encoded_by_ray(records, groups, read, (self.encoder, self.audio_encoder), self.options)
        batches = [[records[i] for i in group] for _, group in groups]
        return read_many(batches, partial(read, generator=None), join, workers=self.options.num_workers)

    def _is_done(self, part: Part, item: StoreItem) -> bool:
        """Return whether a part contains or skipped a video whose file is unchanged.

        For a skipped file, the digest is not enough: a repair may have changed bytes that it does not cover.
        """
        stored = self.writer.parts[part]
        if item.key in stored.places:
            return not Path(item.path).is_file() or is_same_file(item.path, stored.marks[item.key])
        return item.key in stored.skipped and is_same_file(item.path, stored.marks[item.key], copies=False)

    def _append(self, part: Part, items: Sequence[StoreItem], *content: Any) -> None:
        with self.report.timing("writing"):
            self.writer.append(part, items, *content)
        self.report.written[part] = self.report.written.get(part, 0) + len(items)


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
