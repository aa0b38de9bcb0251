"""Target of an audit: a method with some texts and videos of an evaluation split."""

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tvr_lightning.audit.experiments import Features
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.records import Split, SplitName
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import memory_budget
from tvr_lightning.evaluation.loop import encode_split
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.restricted_trainer import RestrictedTrainer
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.training.distributed import world_size
from tvr_lightning.training.sharding import gathered

LEAST_VIDEOS = 4  # so that some of them can be removed
REPEAT = 600.0  # maximum number of seconds for repeating a whole test
CAPTIONS = 3  # captions per video; more would take time and show nothing new


class AuditTarget:
    """A method with N texts and M videos of a split, which it encodes and scores as in an evaluation.

    Texts and videos are in the order of the split, and their batches contain their positions in it. They are read from
    a decoy of the data. Accesses of the method to its trainer are recorded. The arguments are those of `audit_method`.

    Attributes:
        decoy: The data, set up with other captions for the videos of evaluation splits.
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
        self.method = method
        self.data = data
        self.generator = generator
        self.start = time.monotonic()
        self.seconds = seconds
        self.deadline = self.start + seconds
        self.precision = method.trainer.precision_plugin.forward_context
        self.released = method.protocol == "as-released"
        self.function: Any = method.score_as_released if self.released else method.score
        self.asked: list[str] = []
        self.split = split
        self.turn = int(torch.randint(2**31, (), generator=generator))
        self.decoy = data.with_other_captions(self._paired_anew)
        if world_size() == 1:  # also if this device audits while the others wait
            vars(self.decoy).update(_sharing=lambda: {"replicas": 1, "rank": 0})
        self.decoy.setup("validate" if split == "val" else "test")
        items = data.load_split(split)
        captions = items.texts_of_videos()
        loaders: Any = self.decoy.evaluation_dataloaders(split)
        texts, clips = (loader.dataset for loader in loaders)
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
        method = self.method
        trainer = self.method._trainer
        method.trainer = RestrictedTrainer(trainer, type(method).__name__, self.asked, data)  # type: ignore[assignment]
        try:
            yield
        finally:
            method.trainer = trainer

    def _paired_anew(self, split: Split) -> Split:
        """Return an evaluation split in which every text belongs to another video, also if it is changed twice."""
        m = len(split.videos)
        turn = 0 if split.name == "train" else 1 + self.turn % max(1, (m - 1) // 2)
        texts = [dataclasses.replace(text, video=(text.video + turn) % m) for text in split.texts]
        return dataclasses.replace(split, texts=texts)

    def read_again(self, videos: Tensor) -> VideoBatch:
        """Read videos (m,) again, with their own captions in the data."""
        clips: Any = self.data.evaluation_dataloaders(self.split)[1].dataset
        places = self.videos.index[videos].tolist()
        return VideoBatch.cat([clips[place] for place in places]).to(self.method.device)

    def drawn(self, items: int, count: int | None = None) -> Tensor:
        """Return `count` of `items` numbers in random order. Default: all of them."""
        return torch.randperm(items, generator=self.generator)[:count]

    def encode(self, texts: Tensor, videos: Tensor, batch_size: int | None = None) -> Features:
        """Encode texts (n,) and then videos (m,) as an evaluation does, in batches; return them in ascending order."""
        method = self.method
        size = batch_size or self.batch_size
        method.on_test_epoch_start()
        loaders: list[tuple[TextBatch | VideoBatch, Tensor]] = [(self.texts, texts), (self.videos, videos)]
        for loader, (items, drawn) in enumerate(loaders):
            for number, rows in enumerate(drawn.split(size)):
                if time.monotonic() > self.deadline:
                    raise UserError(f"it did not end within {self.seconds:g} s. Set a smaller evaluation.audit.")
                with self.precision():
                    method.test_step(items[rows], number, loader)
        encoded = method.encoded.join(method.device)
        return encoded[0].distinct().features.float(), encoded[1].distinct().features.float()

    def whole_test(self) -> tuple[Features, Tensor] | None:
        """Encode and score the whole split in the orders of a test.

        Return the features of the audited items and their scores (n, m), or None if it would take too long.
        """
        method = self.method
        loaders: Any = getattr(self.decoy, f"{self.split}_dataloader")()
        now = time.monotonic()
        expected = (now - self.start) / len(self.videos) * len(loaders[1].dataset)
        if expected > min(REPEAT, self.deadline - now) and world_size() == 1:  # several devices must not part
            return None
        encoded: Any = encode_split(method, loaders, compact=method.compacts_texts(), context=self.precision)
        generator = torch.Generator().manual_seed(method.evaluation_config.seed)
        placed: list[tuple[Any, Tensor]] = []
        for items, audited in zip(encoded, (self.texts.index, self.videos.index), strict=True):
            order = torch.randperm(len(items), generator=generator)  # as `Evaluator` scores them
            rows = torch.argsort(order)[torch.searchsorted(items.index, audited.cpu())]
            placed.append((items.features[order], rows))
        (texts, rows), (videos, columns) = placed
        found = texts[rows].to(method.device), videos[columns].to(method.device)
        budget = memory_budget(method.evaluation_config.memory_gib, method.device)
        source = PairScores(method.score, texts, videos, memory_budget_bytes=budget, device=method.device)
        scores = torch.zeros(len(texts), len(columns))
        with gathered(method, method.encoder):
            for block in source.blocks():
                inside = (columns >= block.columns.start) & (columns < block.columns.stop)
                scores[block.rows, inside] = block.values[:, columns[inside] - block.columns.start].cpu()
        return found, scores[rows]

    def encode_told(self) -> Features:
        """Encode all items in the order of the split, with all help: their positions in the split and their names."""
        method = self.method
        size = self.batch_size
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
