"""Extraction: runs frozen encoders over a dataset or a folder of videos and writes the features to a store."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from torch import Tensor, nn

from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.extract.batch import EncodedBatch, ReadMedia, encode, join
from tvr_lightning.extract.cluster import encoded_by_ray
from tvr_lightning.extract.fingerprint import fingerprints
from tvr_lightning.extract.plan import ExtractOptions, ExtractReport, ExtractSource, parts_of
from tvr_lightning.media.read_many import read_many
from tvr_lightning.progress import progress_bar
from tvr_lightning.store import Part, StoreItem, StoreWriter, file_mark, is_same_file


@contextlib.contextmanager
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
    """Write the features of a source to a store. Stored features of unchanged files are kept.

    Videos that an earlier run skipped are tried again if their files have changed.

    If the process is killed, rerun it to get the same store as without the interruption: batches do not cross shards,
    which follow the order of the source.

    Args:
        source: Videos and texts.
        encoder: Encoder of frames and texts, run in eval mode.
        audio_encoder: Audio encoder, if audio is extracted.
        options: Parts, batch sizes, workers, and folder.
        bar: Progress that replaces the bar of the options, such as a `progress_file`.

    Raises:
        StoreError: The store has other settings, another process is writing it, or the disk is full.
    """
    began = time.perf_counter()
    report = ExtractReport()
    parts = parts_of(options.what, source, encoder, audio_encoder)
    made = fingerprints(source, encoder, audio_encoder, parts)
    with (
        frozen(options.device, encoder, audio_encoder),
        StoreWriter(options.out, made, options.command, options.dtype) as writer,
    ):
        report.mended = writer.mended
        run = _Extraction(source, encoder, audio_encoder, options, writer, report)
        with bar or progress_bar(options.progress) as progress:
            if "text" in parts:
                run.texts(progress)
            run.videos([part for part in parts if part != "text"], progress)
    report.seconds = time.perf_counter() - began
    return report


class _Extraction:
    """One run that reads, encodes, and writes shard by shard."""

    def __init__(
        self,
        source: ExtractSource,
        encoder: Encoder,
        audio_encoder: AudioEncoder | None,
        options: ExtractOptions,
        writer: StoreWriter,
        report: ExtractReport,
    ) -> None:
        self.source, self.encoder, self.audio_encoder = source, encoder, audio_encoder
        self.options, self.writer, self.report = options, writer, report

    def texts(self, progress: Progress) -> None:
        """Encode and write the texts that are missing in the store."""
        unique = list({item.key: item for item in self.source.texts}.values())
        done = self.writer.parts["text"].places
        missing = [item for item in unique if item.key not in done]
        self.report.kept["text"] = len(unique) - len(missing)
        task = progress.add_task("texts", total=len(unique), completed=len(unique) - len(missing))
        for items in _chunks(missing, self.options.shard_size):
            features = []
            for batch in _chunks(items, self.options.batch_size):
                with self._timing("encoding"):
                    features.append(self._encode_text([str(item.text) for item in batch]))
                progress.advance(task, len(batch))
            sentence, words, mask = (torch.cat(tensors) for tensors in zip(*features, strict=True))
            self._append("text", items, {"sentence": sentence, "words": words}, mask, [])

    def videos(self, parts: Sequence[Part], progress: Progress) -> None:
        """Decode, encode, and write the videos that are missing in a part of the store."""
        videos = list({item.key: (record, item) for record, item in self.source.videos}.values())
        wanted = [tuple(part for part in parts if not self._is_done(part, item)) for _, item in videos]
        for part in parts:
            kept = self.writer.parts[part].places
            self.report.kept[part] = sum(
                part not in lacking and item.key in kept for lacking, (_, item) in zip(wanted, videos, strict=True)
            )
        open_items = [i for i, lacking in enumerate(wanted) if lacking]
        for i, (record, item) in enumerate(videos):
            if any(item.key in self.writer.parts[part].skipped for part in parts):
                self.report.retried += bool(wanted[i])
                self.report.still_skipped += not wanted[i]
            if wanted[i]:  # marked before reading, so that a file that changes during the run is read again later
                videos[i] = (record, dataclasses.replace(item, file=file_mark(item.path)))
        shards = [
            (lacking, chunk)
            for lacking, group in groupby(open_items, key=lambda i: wanted[i])
            for chunk in _chunks(list(group), self.options.shard_size)
        ]
        if not shards:
            return
        task = progress.add_task("videos", total=len(videos), completed=len(videos) - len(open_items))
        records = [record for record, _ in videos]
        batches = [(lacking, batch) for lacking, chunk in shards for batch in _chunks(chunk, self.options.batch_size)]
        models = (self.encoder, self.audio_encoder)
        encoded = (
            self._encoded(records, batches)
            if self.options.engine == "local"
            else self._waited_for(encoded_by_ray(records, batches, self.source, models, self.options))
        )
        for lacking, chunk in shards:
            features: dict[Part, list[tuple[Tensor, Tensor]]] = {part: [] for part in lacking}
            read: list[int] = []
            failed: list[tuple[StoreItem, str]] = []
            for batch in _chunks(chunk, self.options.batch_size):
                found = next(encoded)
                failed += [(videos[i][1], reason) for i, reason in found.failed]
                self.report.problems += found.problems
                read += found.read
                for part in lacking:
                    if part in found.features:
                        features[part].append(found.features[part])
                progress.advance(task, len(batch))
            self.report.skipped += [f"{item.path}: {reason}" for item, reason in failed]
            for part in lacking:
                values, mask = _joined(features[part])
                self._append(part, [videos[i][1] for i in read], {part: values}, mask, failed)

    def _is_done(self, part: Part, item: StoreItem) -> bool:
        """Return whether a part contains or skipped a video whose file is unchanged.

        For a skipped file, the digest is not enough: a repair may have changed bytes that it does not cover.
        """
        stored = self.writer.parts[part]
        if item.key in stored.places:
            return not Path(item.path).is_file() or is_same_file(item.path, stored.marks[item.key])
        return item.key in stored.skipped and is_same_file(item.path, stored.marks[item.key], copies=False)

    def _append(
        self,
        part: Part,
        items: Sequence[StoreItem],
        tensors: dict[str, Tensor],
        mask: Tensor,
        failed: Sequence[tuple[StoreItem, str]],
    ) -> None:
        with self._timing("writing"):
            self.writer.append(part, items, tensors, mask, failed)
        self.report.written[part] = self.report.written.get(part, 0) + len(items)

    def _encode_text(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        features = self.encoder.encode_text(captions, self.source.words)
        return features.sentence.cpu(), features.words.cpu(), features.word_mask.cpu()

    def _encoded(
        self, records: list[VideoRecord], batches: Sequence[tuple[Sequence[Part], list[int]]]
    ) -> Iterator[EncodedBatch]:
        """Yield the batches, read by worker processes and encoded in this process."""
        groups = [[(place, records[place]) for place in places] for _, places in batches]
        loaded = read_many(groups, ReadMedia(self.source.read), join, workers=self.options.num_workers)
        for parts, _ in batches:
            with self._timing("waiting"):
                read = next(loaded)
            with self._timing("encoding"):
                encoded = encode(read, parts, self.encoder, self.audio_encoder, self.options.device)
            yield encoded

    def _waited_for(self, encoded: Iterator[EncodedBatch]) -> Iterator[EncodedBatch]:
        while True:
            with self._timing("waiting"):
                batch = next(encoded, None)
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def _timing(self, name: Literal["waiting", "encoding", "writing"]) -> Iterator[None]:
        began = time.perf_counter()
        yield
        setattr(self.report, name, getattr(self.report, name) + time.perf_counter() - began)


def _joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if not pairs:  # every video of the shard was skipped
        return torch.zeros(0, 0, 0), torch.zeros(0, 0, dtype=torch.bool)
    return torch.cat([values for values, _ in pairs]), torch.cat([mask for _, mask in pairs])


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
