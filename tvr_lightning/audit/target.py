"""Target of an audit: a method with some texts and videos of an evaluation split."""

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from tvr_lightning.audit.experiments import Features
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.datasets import TextDataset, VideoDataset
from tvr_lightning.data.records import Split, SplitName
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.restricted_trainer import RestrictedTrainer
from tvr_lightning.features import IndexedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.training.sharding import gathered

LEAST_VIDEOS = 4  # so that some of them can be removed
CAPTIONS = 3  # captions per video; more would take time and show nothing new
F = TypeVar("F", TextFeatures, VideoFeatures)


class AuditTarget:
    """A method with N texts and M videos of a split, which it encodes and scores as in an evaluation.

    Texts and videos are in the order of the split, and their batches contain their positions in it. Accesses of the
    method to its trainer are recorded.

    Args:
        method: Method on the device to run on, in evaluation mode.
        data: DataModule with the split.
        split: Split to audit.
        videos: Maximum number of videos to draw, each with its first texts.
        generator: Random generator for the draw and for all orders.
        seconds: Time after which encoding stops with an error.

    Attributes:
        video_of_text: Index of the video that each text describes, (N,) int64.
        own_text: Index of the first text of each video, (M,) int64.
        released: Whether the protocol gives every video its own caption.
        function: The method's scoring function for the protocol.
        asked: Attributes of the trainer that the method accessed while it encoded and scored.
    """

    def __init__(
        self,
        method: RetrievalModule,
        data: TextVideoDataModule,
        split: SplitName,
        videos: int,
        generator: torch.Generator,
        seconds: float = math.inf,
    ) -> None:
        self.method, self.data, self.generator = method, data, generator
        self.seconds, self.deadline = seconds, time.monotonic() + seconds
        self.precision = method.trainer.precision_plugin.forward_context
        self.released = method.protocol == "as-released"
        self.function: Any = method.score_as_released if self.released else method.score
        self.asked: list[str] = []
        items, read = data.load_split(split), data.video_reader(training=False)
        captions = items.texts_of_videos()
        clips = VideoDataset(items, read, skip=data.reading.on_corrupt == "skip")
        described = [place for place, own in enumerate(captions) if own]
        drawn: dict[int, VideoBatch] = {}
        for number in torch.randperm(len(described), generator=generator).tolist():
            if len(drawn) == videos:
                break
            clip = clips[described[number]]
            if len(clip):
                drawn[described[number]] = dataclasses.replace(clip, skipped=[])
        places = sorted(drawn)
        rows = sorted(row for place in places for row in captions[place][:CAPTIONS])
        if len(places) < LEAST_VIDEOS:
            raise UserError(f"An audit needs at least {LEAST_VIDEOS} readable videos, but the split has {len(places)}.")
        texts = TextDataset(items, read)
        self.texts = TextBatch.cat([texts[row] for row in rows]).to(method.device)
        self.videos = VideoBatch.cat([drawn[place] for place in places]).to(method.device)
        column = {place: number for number, place in enumerate(places)}
        self.video_of_text = torch.tensor([column[items.texts[row].video] for row in rows])
        first = torch.full((len(places),), len(rows))
        self.own_text = first.scatter_reduce(0, self.video_of_text, torch.arange(len(rows)), "amin")
        self.batch_size = data.eval_batch_size

    @contextmanager
    def with_data(self, data: TextVideoDataModule) -> Iterator[None]:
        """Replace the method's DataModule with `data`, and record accesses to it."""
        method, trainer = self.method, self.method._trainer
        method.trainer = RestrictedTrainer(trainer, type(method).__name__, self.asked, data)  # type: ignore[assignment]
        try:
            yield
        finally:
            method.trainer = trainer

    def decoy(self) -> TextVideoDataModule:
        """Return data whose evaluation splits pair texts and videos at random."""
        return self.data.with_evaluation_splits(self._paired_anew)

    def _paired_anew(self, split: Split) -> Split:
        other = self.drawn(len(split.videos)).tolist()
        return dataclasses.replace(split, texts=[dataclasses.replace(t, video=other[t.video]) for t in split.texts])

    def drawn(self, items: int, count: int | None = None) -> Tensor:
        """Return `count` of `items` numbers in random order. Default: all of them."""
        return torch.randperm(items, generator=self.generator)[:count]

    def encode(self, texts: Tensor, videos: Tensor, batch_size: int | None = None) -> Features:
        """Encode texts (n,) and then videos (m,) as an evaluation does, in batches; return them in ascending order."""
        method, size = self.method, batch_size or self.batch_size
        method.on_test_epoch_start()
        loaders: list[tuple[TextBatch | VideoBatch, Tensor]] = [(self.texts, texts), (self.videos, videos)]
        for loader, (items, drawn) in enumerate(loaders):
            for number, rows in enumerate(drawn.split(size)):
                if time.monotonic() > self.deadline:
                    raise UserError(f"it did not end within {self.seconds:g} s. Set a smaller evaluation.audit.")
                with self.precision():
                    method.test_step(items[rows], number, loader)
        encoded = method.encoded.join(method.device)
        return _only(encoded[0], self.texts.index[texts]), _only(encoded[1], self.videos.index[videos])

    def encode_told(self) -> Features:
        """Encode all items in the order of the split, with all help: their positions in the split and their names."""
        method, size = self.method, self.batch_size
        with self.precision():
            texts = [method.text_features(self.texts[rows]) for rows in torch.arange(len(self.texts)).split(size)]
            texts = [method.compact_text(text) for text in texts] if method.compacts_texts() else texts
            videos = [method.video_features(self.videos[rows]) for rows in torch.arange(len(self.videos)).split(size)]
        return TextFeatures.cat(texts).float(), VideoFeatures.cat(videos).float()

    def scores(self, *features: TextFeatures | VideoFeatures) -> Scores:
        """Score texts and videos (and, in a released protocol, the videos' own captions); the scores are on the CPU."""
        with gathered(self.method, self.method.encoder):
            return Scores(self.function(*features).similarity.cpu())

    def score(self, features: Features, own: Tensor) -> Tensor:
        """Return the scores (n, m); `own` (m,) are the rows of the released protocols' captions of the videos."""
        captions = (features[0][own],) if self.released else ()
        # Copies, since a method that changes them in place would seem to encode them differently afterwards.
        return self.scores(*(each.apply(Tensor.clone) for each in (*features, *captions))).similarity


def _only(collected: IndexedFeatures[F], given: Tensor) -> F:
    """Return the features of the given items (n,) in ascending order, after checking that there are no others."""
    collected = collected.distinct()
    if not torch.equal(collected.index, given.sort().values):
        raise UserError(f"the method was given {len(given)} items and collected others: {collected.index[:8].tolist()}")
    return collected.features.float()
