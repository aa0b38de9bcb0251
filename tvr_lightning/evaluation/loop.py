"""Evaluation loop: encode the batches of a split, gather the features of all devices, and rank or predict.

Methods receive batches without indices and with restricted access to the trainer, and texts and videos are scored in
seeded random orders, so that a score can depend only on its text and its video. Devices that shard the weights (FSDP2)
gather them in every encoding step, so all devices must encode equally often.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.data.loader import EvaluationSampler
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import memory_budget
from tvr_lightning.evaluation.evaluator import Evaluation, Evaluator, named_items
from tvr_lightning.evaluation.normalization import Bank
from tvr_lightning.evaluation.sources import AdjustedSource, ProcessShare, ScoreSource, best_of_gallery
from tvr_lightning.features import IndexedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.metrics import direction_metrics
from tvr_lightning.training.distributed import gather_batches, gather_objects, gather_tensor, rank, world_size
from tvr_lightning.training.sharding import gathered, is_sharded

Method = Any  # a `RetrievalModule`, whose package imports this one
# Features of the encoded texts and videos of a split, gathered from all devices; indices may repeat.
SplitFeatures = tuple[IndexedFeatures[TextFeatures], IndexedFeatures[VideoFeatures]]


@dataclass
class Collection:
    """Features of a split that this process has encoded so far.

    Attributes:
        texts, videos: features of B items each, with their indices in the split.
        skipped: files that could not be read so far, each with its reason; kept by `clear`.
    """

    texts: list[IndexedFeatures[TextFeatures]] = field(default_factory=list)
    videos: list[IndexedFeatures[VideoFeatures]] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)

    def add(self, method: Method, batch: TextBatch | VideoBatch, compact: bool = False) -> None:
        """Encode one batch on the method's device; if `compact`, keep only features that `score` uses.

        If no video of a batch could be read and the weights are sharded, a blank video is encoded, because all devices
        must encode together.
        """
        with method.restricted():
            if isinstance(batch, TextBatch):
                text = method.text_features(batch.anonymous())
                self.texts.append(IndexedFeatures(batch.index, method.compact_text(text) if compact else text))
                return
            self.skipped.update(batch.skipped)
            if len(batch):
                video = method.video_features(batch.anonymous())
                self.videos.append(IndexedFeatures(batch.index, method.compact_video(video) if compact else video))
            elif is_sharded(method):
                blank = batch.video.apply(lambda t: t.new_full((1, *t.shape[1:]), t.dtype == torch.bool))
                method.video_features(VideoBatch(blank, batch.index.new_zeros(1), ["blank"]))

    def clear(self) -> None:
        """Remove the features."""
        self.texts.clear()
        self.videos.clear()

    def join(self, device: torch.device) -> SplitFeatures:
        """Return the features of all devices, which may have read different numbers of videos, and remove them here."""
        return self.joined("texts", device), self.joined("videos", device)

    def joined(self, kind: Literal["texts", "videos"], device: torch.device) -> IndexedFeatures[Any]:
        """Return the features of one kind of all devices, as `join` does."""
        joined = gather_batches(getattr(self, kind), device)
        getattr(self, kind).clear()
        if joined is None:
            raise self.nothing(kind)
        return joined

    def nothing(self, kind: str) -> UserError:
        """Return the error for loaders without readable texts or videos."""
        skipped = "; ".join(self.skipped_anywhere()[:5])
        return UserError(f"the evaluation loaders returned no {kind}; skipped: {skipped or 'no file'}")

    def skipped_anywhere(self) -> list[str]:
        """Return the files that could not be read on any device, each with its reason."""
        return sorted(set().union(*gather_objects(self.skipped)))


@torch.no_grad()
def encode_split(
    method: Method,
    loaders: Iterable[DataLoader[Any]],
    *,
    compact: bool = False,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    skipped: set[str] | None = None,
) -> SplitFeatures:
    """Encode a whole split into main memory in float32: every item once, by index, the same on every device.

    The loaders are those of the unique texts and unique videos, with equally many batches on every device. With
    `compact`, only features that `score` uses are kept. `context` is that of encoding, such as autocast. Files that
    could not be read are added to `skipped`.
    """
    whole = Collection(skipped=set() if skipped is None else skipped)
    for loader in loaders:
        for batch in loader:
            part = Collection(skipped=whole.skipped)
            with context():
                part.add(method, batch.to(method.device), compact)
            # One batch at a time, so that no device stores more than its part of the split.
            kind = "texts" if isinstance(batch, TextBatch) else "videos"
            joined = gather_batches(getattr(part, kind), method.device)
            if joined is not None:
                getattr(whole, kind).append(joined.float().to("cpu"))
    if not whole.texts or not whole.videos:
        raise whole.nothing("videos" if whole.texts else "texts")
    return IndexedFeatures.cat(whole.texts).distinct(), IndexedFeatures.cat(whole.videos).distinct()


def encode_bank(method: Method, trainer: Trainer, skipped: set[str]) -> Bank:
    """Encode at most `evaluation.bank_size` training texts and videos each; unreadable files are added to `skipped`."""
    config, data = method.evaluation_config, trainer.datamodule  # type: ignore[attr-defined]
    if not hasattr(data, "evaluation_dataloaders"):
        raise UserError(
            f"evaluation.normalization: {type(config.normalization).__name__} needs the training split, which only the "
            "data modules of this project have. Choose another one, or null."
        )
    loaders = bank_loaders(data.evaluation_dataloaders("train"), config.bank_size, config.seed)
    context = trainer.precision_plugin.forward_context
    texts, videos = encode_split(method, loaders, compact=True, context=context, skipped=skipped)
    return Bank(texts.features, videos.features)


def bank_loaders(loaders: Sequence[DataLoader[Any]], size: int, seed: int) -> list[DataLoader[Any]]:
    """Limit loaders of `evaluation_dataloaders("train")` to `size` items, sampled with the same seed in all processes.

    Items keep the order of the split and their indices in it, and every process has equally many batches.
    """
    limited = []
    for loader in loaders:
        dataset: Any = loader.dataset
        if len(dataset) > size:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randperm(len(dataset), generator=generator)[:size].sort().values
            sampler = EvaluationSampler.of(loader)
            loader = type(loader)(  # a subclass may re-raise errors of its workers
                Subset(dataset, drawn.tolist()),
                batch_size=loader.batch_size,
                sampler=EvaluationSampler(size, replicas=sampler.num_replicas, rank=sampler.rank),
                num_workers=loader.num_workers,
                multiprocessing_context=loader.multiprocessing_context,
                pin_memory=loader.pin_memory,
                collate_fn=loader.collate_fn,
            )
        limited.append(loader)
    return limited


def evaluate(method: Method, split: SplitFeatures, truth: GroundTruth, sanity_check: bool = False) -> Evaluation:
    """Rank all texts and videos of a split; the result is the same on every device.

    A sanity check skips the normalization, because an untrained run has empty queues and a bank is not worth encoding.
    """
    config = method.evaluation_config
    released = method.protocol == "as-released"
    if released and not sanity_check:
        rank_zero_warn(
            "protocol: as-released scores every video under its own caption, so ground truth leaks into the ranking "
            "and the results are not comparable with others. protocol: query avoids this."
        )
    share = ProcessShare(rank(), world_size(), lambda tensor: gather_tensor(tensor.unsqueeze(0)))
    scores = {"score_as_released": method.score_as_released} if released else {"score": method.score}
    evaluator = _evaluator(method, shard=share, measure_balance=config.balance, **scores)
    normalizer = None if sanity_check else config.normalization
    bank = method.bank() if normalizer is not None and normalizer.needs_bank else None
    texts, videos = split
    metrics = [*direction_metrics(config.recall), *config.metrics]
    with method.restricted(), gathered(method, method.encoder):
        return evaluator.evaluate(
            texts.features, texts.index, videos.features, videos.index, truth, normalizer, bank, metrics
        )


def _evaluator(method: Method, **options: Any) -> Evaluator:
    config = method.evaluation_config
    common = {"temperature": method.score_temperature(), "parts": method.averaged_parts, "device": method.device}
    # The devices share the blocks, whose sizes follow from the budget.
    budget = min(gather_objects(memory_budget(config.memory_gib, method.device)))
    return Evaluator(seed=config.seed, memory_budget_bytes=budget, **common, **options)


def predict(method: Method, split: SplitFeatures, truth: GroundTruth) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best videos of every text, after the normalization of the recipe.

    Return ascending indices of the texts (N,), descending scores (N, k) float64 or keys in their order, and indices of
    the videos (N, k).
    """
    config = method.evaluation_config
    texts, videos = (items.distinct() for items in split)
    # Random orders, as in evaluation: positions must not reveal which video belongs to which text.
    generator = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(len(texts), generator=generator)
    texts, videos = texts[order], videos[torch.randperm(len(videos), generator=generator)]
    normalizer = copy.deepcopy(config.normalization)
    evaluator = _evaluator(method, score=method.score)
    items = named_items(truth, texts.index, videos.index)
    source = evaluator.pair_scores(texts.features, videos.features, **items)
    captions = torch.bincount(truth.video_of_text[texts.index.cpu()], minlength=truth.videos)[videos.index.cpu()]
    bank = method.bank() if normalizer is not None and normalizer.needs_bank else None
    with method.restricted(), gathered(method, method.encoder):
        scores: ScoreSource = source
        if normalizer is not None:
            context = evaluator.context("text-to-video", normalizer, bank, source, captions)
            scores = AdjustedSource(source, normalizer.fit(source, replace(context, keys=True, both=False)))
        values, columns = best_of_gallery(scores, config.top_k)
    back = torch.argsort(order)
    return texts.index[back], values[back], videos.index.to(columns.device)[columns[back]]
