"""Subject of an audit: a method with some texts and videos of an evaluation split."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tvr_lightning.audit.experiments import LEAST_ITEMS
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import TextBatch, VideoBatch, collate
from tvr_lightning.data.datasets import TextDataset, VideoDataset
from tvr_lightning.data.records import Split, SplitName
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.restricted_trainer import RestrictedTrainer
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures, first_of_each
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.training.sharding import gathered

CAPTIONS = 3  # captions per video; more would take time and show nothing new
Features = tuple[TextFeatures, VideoFeatures]


class Subject:
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
        self.asked: list[str] = []
        items, read = data.load_split(split), data.video_reader(training=False)
        captions = items.texts_of_videos()
        clips = VideoDataset(items, read, skip=data.on_corrupt == "skip")
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
        if len(places) < LEAST_ITEMS:
            raise UserError(f"An audit needs at least {LEAST_ITEMS} readable videos, but the split has {len(places)}.")
        texts = TextDataset(items, read)
        self.texts: TextBatch = collate([texts[row] for row in rows]).to(method.device)
        self.videos: VideoBatch = collate([drawn[place] for place in places]).to(method.device)
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
        decoy = copy.copy(self.data)
        decoy._read = {name: self._paired_anew(split) for name, split in self.data._read.items() if name != "train"}
        decoy._loaded = {name: self._paired_anew(split) for name, split in self.data._loaded.items() if name != "train"}
        return decoy

    def _paired_anew(self, split: Split) -> Split:
        other = self.drawn(len(split.videos)).tolist()
        return dataclasses.replace(split, texts=[dataclasses.replace(t, video=other[t.video]) for t in split.texts])

    def drawn(self, items: int, count: int | None = None) -> Tensor:
        """Return `count` of `items` numbers in random order. Default: all of them."""
        return torch.randperm(items, generator=self.generator)[:count]

    def encode(self, texts: Tensor, videos: Tensor, batch_size: int | None = None) -> Features:
        """Encode texts (n,) and then videos (m,) as an evaluation does, in batches; return features in ascending order.

        Raises:
            UserError: The method collects other items than those it was given.
        """
        method, size = self.method, batch_size or self.batch_size
        method.on_test_epoch_start()
        loaders: list[tuple[TextBatch | VideoBatch, Tensor]] = [(self.texts, texts), (self.videos, videos)]
        for loader, (items, drawn) in enumerate(loaders):
            for number, rows in enumerate(drawn.split(size)):
                if time.monotonic() > self.deadline:
                    raise UserError(f"it did not end within {self.seconds:g} s. Set a smaller evaluation.audit.")
                with self.precision():
                    method.test_step(items[rows], number, loader)
        split = method.encoded.join(method.device)
        text = split.texts.features[_by_row(split.texts.index, self.texts.index, texts)]
        video = split.videos.features[_by_row(split.videos.index, self.videos.index, videos)]
        return text.float(), video.float()

    def encode_told(self) -> Features:
        """Encode all items in the order of the split, with all help: their positions in the split and their names."""
        method = self.method
        with self.precision():
            texts = [method.text_features(self.texts[rows]) for rows in self._in_order(self.texts)]
            texts = [method.compact_text(text) for text in texts] if method.compacts_texts() else texts
            videos = [method.video_features(self.videos[rows]) for rows in self._in_order(self.videos)]
        return TextFeatures.cat(texts).float(), VideoFeatures.cat(videos).float()

    def _in_order(self, batch: TextBatch | VideoBatch) -> tuple[Tensor, ...]:
        return torch.arange(len(batch)).split(self.batch_size)

    @property
    def scoring(self) -> dict[str, Callable[..., Scores]]:
        """Scoring function of the method, under the name that `audit_scores` uses for it. The scores are on the CPU."""
        released = self.method.protocol == "as-released"
        function: Callable[..., Scores] = self.method.score_as_released if released else self.method.score

        def score(*records: TextFeatures | VideoFeatures) -> Scores:
            with gathered(self.method, self.method.encoder):
                return Scores(function(*records).similarity.cpu())

        return {"score_as_released" if released else "score": score}

    def score(self, features: Features, own: Tensor) -> Tensor:
        """Return the scores (n, m) on the CPU; `own` (m,) are the released protocols' captions of the videos."""
        ((name, score),) = self.scoring.items()
        text, video = features
        return (score(text, video, text[own]) if name == "score_as_released" else score(text, video)).similarity


def _by_row(index: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Return the position in `index` of each row in ascending order. Duplicates count once."""
    row = {place: number for number, place in enumerate(places.tolist())}
    found = torch.tensor([row.get(place, -1) for place in index.tolist()])
    first = first_of_each(found)
    if not torch.equal(found[first], rows.sort().values):
        raise UserError(f"the method was given {len(rows)} items and collected others: {index.tolist()[:8]} ...")
    return first
