"""The LightningModule that every paper extends: encoding, training, evaluation, prediction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from tvr_lightning.checkpoints import CheckpointError
from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.bank import bank_loaders
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.evaluator import Evaluation, Evaluator
from tvr_lightning.evaluation.normalization import Bank, Context, Normalizer
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.predictions import best_videos
from tvr_lightning.evaluation.sealed import SealedTrainer
from tvr_lightning.evaluation.sources import Shard
from tvr_lightning.extract.check import check_store
from tvr_lightning.features import PairedFeatures, Record, Scores, TextFeatures, VideoFeatures
from tvr_lightning.ranges import Kind
from tvr_lightning.training.distributed import (
    Gather,
    gather_batches,
    gather_objects,
    gather_record,
    gather_tensor,
    rank,
    world_size,
)
from tvr_lightning.training.gradient_cache import encode_in_chunks
from tvr_lightning.training.losses import LogitMap, info_nce, local_info_nce
from tvr_lightning.training.optim import OptimizerConfig, build_optimizer
from tvr_lightning.training.sharding import gathered, is_sharded, shard

R = TypeVar("R", bound=Record)
PAIR_BYTES = 256
"""What predicting holds for every pair of a text and a video at a time."""


Protocol = Literal["query", "as-released"]
"""`query` scores every video as the query asks; `as-released` reproduces evaluations that leak ground truth."""


class Temperature(nn.Module):
    """CLIP's learnt inverse temperature exp(logit_scale), a scalar up to 100 (CLIP4Clip clamps after every step)."""

    maximum = math.log(100.0)

    def __init__(self, initial: float) -> None:
        """Start at the log inverse temperature `initial`; ln 100 = 4.6052 in OpenAI's weights."""
        super().__init__()
        # One element, not zero dimensions: FSDP2 shards along the first dimension.
        self.logit_scale = nn.Parameter(torch.tensor([min(initial, self.maximum)]))

    def forward(self) -> Tensor:
        """Return exp(logit_scale), a scalar."""
        return self.logit_scale.exp().sum()  # of one element; a view would trouble FSDP2

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep the inverse temperature at or below 100."""
        self.logit_scale.clamp_(max=self.maximum)


class NonFiniteLossError(UserError, RuntimeError):
    """A loss term became NaN or infinite; says which, at which step, on which videos."""


class RetrievalModule(LightningModule):
    """What the five papers share: an encoder, a scoring function over all pairs, a loss over matching pairs.

    A method overrides `score`, and where its paper does so `encode_text`, `encode_video`, `losses` and `update_state`.
    Scores and losses are computed in float32 with autocast off (float64 stays): bfloat16 moves scores by more than
    neighbouring ranks differ.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give (`tvr_lightning.training.distributed`).

    Raises:
        ValueError: more words than the encoder takes, or `gather: local` with a loss that needs all scores together.
    """

    needs_patches = False
    protocol: Protocol = "query"

    def __init__(
        self,
        encoder: Encoder,
        optimizer: OptimizerConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        words: int = 32,
        frames: int = 12,
        gather: Gather = "global",
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # Built in Python rather than from a recipe, encoders are among the arguments; they are dropped below.
            warnings.filterwarnings("ignore", message="Attribute '.*' is an instance of `nn.Module`")
            self.save_hyperparameters(logger=False)
        for name, value in list(self.hparams.items()):
            if isinstance(value, nn.Module) or callable(value):
                del self.hparams[name]
            elif is_dataclass(value) and not isinstance(value, type):
                self.hparams[name] = _plain(value)
        # So that load_from_checkpoint makes classes of what the lines above wrote down, as it does of a recipe's.
        self.hparams.setdefault("_instantiator", "lightning.pytorch.cli.instantiate_module")
        if words > encoder.context_length:
            raise ValueError(
                f"words: {words} exceeds the encoder's context of {encoder.context_length} tokens; "
                f"lower data.init_args.words to {encoder.context_length} or less"
            )
        if gather == "local" and type(self).losses is not RetrievalModule.losses:
            raise ValueError(
                f"gather: local is for losses that are InfoNCE over rows and columns alone; that of "
                f"{type(self).__name__} needs the scores of the whole batch together: use gather: global"
            )
        self.encoder = encoder
        self.optimizer_config = optimizer or OptimizerConfig()
        self.evaluation_config = evaluation or EvaluationConfig()
        self.words = words
        self.frames = frames
        self.gather = gather
        self.temperature = Temperature(encoder.initial_logit_scale())
        self.evaluation: Evaluation | None = None
        self.predictions: tuple[Tensor, Tensor, Tensor] | None = None
        self.bias_logits: LogitMap | None = None
        self._pairs: list[PairedFeatures] = []
        self._texts: list[tuple[Tensor, TextFeatures]] = []
        self._videos: list[tuple[Tensor, VideoFeatures]] = []
        self._skipped: set[str] = set()

    @property
    def image_size(self) -> int:
        """Side of the square frames in pixels that the encoder takes; recipes link it to the data."""
        return self.encoder.image_size

    def setup(self, stage: str) -> None:
        """Check that stored features, where the data read them, are what this run's encoders give, and say so.

        Raises:
            StoreError: the encoder trains, or the store was made with another one.
            ValueError: the encoder's precision does not go with the trainer's precision or strategy.
        """
        self.encoder.check_precision(str(self.trainer.precision), type(self.trainer.strategy).__name__)
        store = getattr(self.trainer.datamodule, "store", None)  # type: ignore[attr-defined]
        if store is not None:
            rank_zero_info(check_store(store, self.encoder, getattr(self, "audio_encoder", None)))

    def configure_model(self) -> None:
        """Share the parameters out over the devices where the strategy is ModelParallelStrategy (FSDP2)."""
        if self.device_mesh is not None:
            shard(self, self.device_mesh["data_parallel"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the weights of another method, and name the tensors that do not fit this one.

        Raises:
            CheckpointError: another method's checkpoint, or tensors that are missing, unexpected or of another shape.
        """
        saved = checkpoint.get("hyper_parameters", {})
        method = str(saved.get("_class_path", type(self).__name__)).rpartition(".")[2]
        if method != type(self).__name__:
            raise CheckpointError(f"the checkpoint holds a {method}, the recipe builds a {type(self).__name__}")
        if "state_dict" not in checkpoint:  # ModelParallelStrategy has loaded the weights already
            return
        expected, found = self.state_dict(), checkpoint["state_dict"]
        wrong = [f"{name} is missing" for name in expected if name not in found]
        wrong += [f"{name} is unexpected" for name in found if name not in expected]
        wrong += [
            f"{name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in found and found[name].shape != tensor.shape
        ]
        if wrong:
            options = ("words", "frames", "keep_rate")
            made = ", ".join(f"{name} {saved[name]}" for name in options if name in saved)
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(
                f"the checkpoint does not fit this {method}: {'; '.join(wrong[:5])}{more}. "
                + (f"It was made with {made}; " if made else "")
                + "use the recipe and options that it was trained with"
            )

    # What a paper defines

    def encode_text(self, text: TextFeatures) -> TextFeatures:
        """Apply the method's own per-text layers to N texts; the base method has none."""
        return text

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Apply the method's own per-video layers to M videos; the base method has none."""
        return video

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos, no pairing known.

        Returns:
            `similarity` (N, M) on the scale of a cosine: times exp(logit_scale) it gives the logits.
        """
        raise TypeError(f"{type(self).__name__} must define score(text, video)")

    def score_as_released(self, text: TextFeatures, video: VideoFeatures, own_text: TextFeatures) -> Scores:
        """Score N texts against M videos that are told their own captions, as two released evaluations do (leaks).

        Only `protocol: as-released` calls it; everything it yields is marked "leaks ground truth".

        Args:
            text: N texts.
            video: M videos.
            own_text: the caption of each of the M videos.
        """
        raise TypeError(f"{type(self).__name__} has no released protocol of its own; use protocol: query")

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return the weighted terms whose sum is trained, scalars by name, from B matching pairs; pure.

        The base method is InfoNCE over rows and columns of the scaled scores (CLIP4Clip, `CrossEn` in both directions).
        """
        logits = self.logits(self.score(pairs.text, pairs.video).similarity)
        return {"info_nce": info_nce(self.contrastive_logits(logits))}

    def local_losses(self, own: PairedFeatures, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return this device's share of `losses`, from its own B pairs and those of all devices (`gather: local`).

        Scalars by name; the mean of their sums over the devices is that of `losses`.
        """
        rows = self.logits(self.score(own.text, pairs.video).similarity)
        columns = self.logits(self.score(pairs.text, own.video).similarity)
        return {"info_nce": local_info_nce(rows, columns, rank() * len(own.text))}

    def logits(self, similarity: Tensor) -> Tensor:
        """Return what InfoNCE sees of scores (N, M), of the same shape: by default scaled by the temperature."""
        return self.temperature() * similarity

    def contrastive_logits(self, logits: Tensor) -> Tensor:
        """Return what InfoNCE is to see of the logits (B, B) of B matching pairs: the same, unless NCL biases them.

        Every method's `losses` passes its logits through here, so that NCL can train any of them.
        """
        return logits if self.bias_logits is None else self.bias_logits(logits)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop what `score` does not read of N texts, so that banks and queues stay small; by default nothing."""
        return text

    def compact_video(self, video: VideoFeatures) -> VideoFeatures:
        """Reduce M videos to what `score` reads of them, scores unchanged; by default nothing is dropped."""
        return video

    def score_temperature(self) -> float:
        """Return gamma, what the loss divides scores by: 1 / exp(logit_scale)."""
        return 1.0 / float(self.temperature().detach())

    def update_state(self, pairs: PairedFeatures) -> None:
        """Called once after every optimiser step with the step's gathered, detached pairs (NCL's queues).

        Those of all batches that the step accumulated, in their order; they are kept only where `reads_pairs`.
        """

    @property
    def reads_pairs(self) -> bool:
        """Whether `update_state` does anything with a step's pairs, so that they must be kept for it."""
        return type(self).update_state is not RetrievalModule.update_state

    def encode_extras(self, batch: PairBatch) -> dict[str, Any]:
        """Turn a batch's extras into those of `PairedFeatures`: tensors with first dimension B."""
        return {name: value for name, value in batch.extras.items() if isinstance(value, Tensor)}

    # Encoding

    def text_features(self, batch: TextBatch) -> TextFeatures:
        """Encode N texts with the encoder and the method's own layers."""
        return self.encode_text(self.encoder.encode_text(batch.text, self.words))

    def video_features(self, batch: VideoBatch) -> VideoFeatures:
        """Encode M videos with the encoder and the method's own layers."""
        return self.encode_video(self.encoder.encode_video(batch.video, patches=self.needs_patches))

    def readable_videos(self, batch: VideoBatch) -> list[tuple[Tensor, VideoFeatures]]:
        """Encode M videos; returns their indices (M,) and features, or nothing where none of a batch could be read.

        Devices that share out the weights (FSDP2) gather them in every encoding, so that one with nothing to encode
        encodes a blank video with the others.
        """
        with self.sealed():
            if len(batch):
                return [(batch.index, self.video_features(batch.anonymous()))]
            if is_sharded(self):
                self.video_features(_blank(batch))
        return []

    def pair_features(self, batch: PairBatch) -> PairedFeatures:
        """Encode this device's B pairs; nothing is gathered yet."""
        return PairedFeatures(
            text=self.text_features(batch.text),
            video=self.video_features(batch.video),
            text_index=batch.text.index,
            video_index=batch.video.index,
            extras=self.encode_extras(batch),
        )

    # Training

    def on_train_start(self) -> None:
        """Forget the pairs of a step that an interrupted run in this process left unfinished."""
        self._pairs.clear()

    def training_step(self, batch: PairBatch, batch_idx: int) -> Tensor:
        """Encode, gather, and return the sum of the loss terms, a scalar; every term is logged."""
        self._skipped.update(batch.video.skipped)
        chunk = self.optimizer_config.gradient_cache
        encoded = encode_in_chunks(self.pair_features, batch, chunk) if chunk else self.pair_features(batch)
        pairs = gather_record(encoded, self.gather)
        with torch.autocast(self.device.type, enabled=False):
            local = self.gather == "local" and world_size() > 1
            terms = self.local_losses(encoded.float(), pairs.float()) if local else self.losses(pairs.float())
        loss = torch.stack([term.reshape(()) for term in terms.values()]).sum()
        if not torch.isfinite(loss):
            self._raise_non_finite(terms, batch)
        if self.reads_pairs:
            self._pairs.append(pairs.detach())
        of_parts = self.gather in ("local", "none") and world_size() > 1  # else every device has the whole loss
        if len(terms) > 1:
            self.log_dict({f"train/{name}": term.detach() for name, term in terms.items()}, sync_dist=of_parts)
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=of_parts)
        self.log("train/temperature", self.temperature().detach())
        return loss

    def _raise_non_finite(self, terms: dict[str, Tensor], batch: PairBatch) -> None:
        broken = ", ".join(
            f"{name} = {float(term.detach()):g}" for name, term in terms.items() if not torch.isfinite(term)
        )
        raise NonFiniteLossError(
            f"step {self.global_step}: the loss is not finite: {broken}; the batch's videos are "
            f"{', '.join(batch.video.video_id)}. Lower the learning rate, or look at these files with `tvr data check`."
        )

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step, clamp the temperature, and let the method update its state.

        Here and not at the end of the batch, where callbacks would save checkpoints before it happens.
        """
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.temperature.clamp()
        if self._pairs:
            self.update_state(PairedFeatures.cat(self._pairs))
            self._pairs.clear()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the recipe's optimiser with its per-step schedule over the whole run."""
        optimizer, scheduler = build_optimizer(
            self,
            self.optimizer_config,
            total_steps=int(self.trainer.estimated_stepping_batches),
            epochs=self.trainer.max_epochs,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # Evaluation

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Keep the trainer's data out of the method's reach while it encodes or scores in an evaluation.

        `self.log` works as ever, and so does what says how the run goes, such as `self.trainer.global_step`.
        """
        trainer = self._trainer
        if trainer is None or isinstance(trainer, SealedTrainer):  # an audit's is in place already
            yield
            return
        self.trainer = SealedTrainer(trainer, type(self).__name__)  # type: ignore[assignment]  # stands for one
        try:
            yield
        finally:
            self.trainer = trainer

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as Lightning does; within an audit nothing is logged."""
        trainer: Any = self._trainer
        if not isinstance(trainer, SealedTrainer):
            super().log(*args, **kwargs)
        elif not trainer.records:
            self.trainer = trainer._sealed
            try:
                super().log(*args, **kwargs)
            finally:
                self.trainer = trainer  # type: ignore[assignment]

    def validation_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Encode one batch of unique texts or unique videos; scoring waits for the end of the epoch."""
        if isinstance(batch, TextBatch):
            with self.sealed():
                self._texts.append((batch.index, self.text_features(batch.anonymous())))
        else:
            self._skipped.update(batch.skipped)
            self._videos += self.readable_videos(batch)

    test_step = validation_step

    def predict_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Encode one batch; returns its (N,) or (M,) indices, since Lightning expects a value."""
        self.validation_step(batch, batch_idx, dataloader_idx)
        return batch.index

    def on_validation_epoch_start(self) -> None:
        """Forget what an earlier evaluation encoded."""
        self._texts.clear()
        self._videos.clear()

    on_test_epoch_start = on_validation_epoch_start
    on_predict_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Score all pairs and log the table."""
        self._evaluate("val")

    def on_test_epoch_end(self) -> None:
        """Score all pairs and log the table."""
        self._evaluate("test")

    def collected_features(self) -> tuple[TextFeatures, Tensor, VideoFeatures, Tensor]:
        """Return what the evaluation loaders gave, over all devices: N texts, indices (N,), M videos, indices (M,).

        Indices may repeat where loaders were padded over devices; devices need not have read equally many videos.

        Raises:
            RuntimeError: a loader gave nothing.
        """
        texts, videos = gather_batches(self._texts, self.device), gather_batches(self._videos, self.device)
        self._texts.clear()
        self._videos.clear()
        if texts is None or videos is None:
            what, reasons = "texts" if texts is None else "videos", self.skipped
            skipped = f"; skipped: {'; '.join(reasons[:5])}" if reasons else ""
            raise RuntimeError(f"the evaluation loaders gave no {what}{skipped}")
        return texts[1], texts[0], videos[1], videos[0]

    @property
    def skipped(self) -> list[str]:
        """Files that could not be read so far, each with its reason, over all devices."""
        return sorted({reason for reasons in gather_objects(sorted(self._skipped)) for reason in reasons})

    def on_predict_epoch_end(self) -> None:
        """Keep the best videos of every text: text index (N,), scores (N, k), video index (N, k)."""
        texts, text_index, videos, video_index = self.collected_features()
        text_index, rows = first_of_each(text_index)
        video_index, columns = first_of_each(video_index)
        # In random orders, as for a table: a place must not say which video belongs to which text.
        generator = torch.Generator().manual_seed(self.evaluation_config.seed)
        order, places = (torch.randperm(len(index), generator=generator) for index in (text_index, video_index))
        texts, videos = texts[rows.cpu()[order]], videos[columns.cpu()[places]]
        normalizer = self.evaluation_config.normalization
        needs_bank = normalizer is not None and normalizer.needs_bank
        bank = self._pair_scores(self.bank().texts, videos) if needs_bank else None
        context = Context("text-to-video", bank, temperature=self.score_temperature())
        source = self._pair_scores(texts, videos)
        with self.sealed(), gathered(self, self.encoder):
            scores, columns = best_videos(source, self.evaluation_config.top_k, normalizer, context)
        back = torch.argsort(order)
        self.predictions = (text_index, scores[back], video_index.cpu()[places].to(columns.device)[columns[back]])

    def _pair_scores(self, texts: TextFeatures, videos: VideoFeatures) -> PairScores:
        budget = int(self.evaluation_config.memory_gib * 2**30)
        return PairScores(
            self.score, texts, videos, memory_budget_bytes=budget, pair_bytes=PAIR_BYTES, device=self.device
        )

    @torch.no_grad()
    def bank(self) -> Bank:
        """Encode the training texts and videos that stand for users' queries in score normalisation.

        At most `evaluation.bank_size` of each, drawn by `evaluation.seed`; kept in main memory.
        """
        config, datamodule = self.evaluation_config, self.trainer.datamodule  # type: ignore[attr-defined]
        texts: list[tuple[Tensor, TextFeatures]] = []
        videos: list[tuple[Tensor, VideoFeatures]] = []
        for loader in bank_loaders(datamodule.evaluation_dataloaders("train"), config.bank_size, config.seed):
            for batch in loader:
                batch = batch.to(self.device)
                with self.trainer.precision_plugin.forward_context(), self.sealed():
                    if isinstance(batch, TextBatch):
                        read = [(batch.index, self.compact_text(self.text_features(batch.anonymous())))]
                        texts += _in_memory(read, self.device)
                    else:
                        self._skipped.update(batch.skipped)
                        seen = [(i, self.compact_video(video)) for i, video in self.readable_videos(batch)]
                        videos += _in_memory(seen, self.device)
        return Bank(_distinct(texts, TextFeatures), _distinct(videos, VideoFeatures))

    def _evaluate(self, stage: str) -> None:
        texts, text_index, videos, video_index = self.collected_features()
        truth = self.trainer.datamodule.ground_truth(stage)  # type: ignore[attr-defined]
        released = self.protocol == "as-released"
        if released and not self.trainer.sanity_checking:
            rank_zero_warn(
                "protocol: as-released scores every video under its own caption: ground truth leaks into the ranking, "
                "and the results are not comparable with others. protocol: query does not."
            )
        evaluator = Evaluator(
            None if released else self.score,
            score_as_released=self.score_as_released if released else None,
            recall=tuple(self.evaluation_config.recall),
            seed=self.evaluation_config.seed,
            memory_budget_bytes=int(self.evaluation_config.memory_gib * 2**30),
            device=self.device,
            shard=Shard(rank(), world_size(), _stacked) if world_size() > 1 else None,
            temperature=self.score_temperature(),
            measure_balance=self.evaluation_config.balance,
        )
        # Sanity checks run before training: queues are empty, and encoding a bank would not be worth it.
        normalizer = None if self.trainer.sanity_checking else self.evaluation_config.normalization
        bank = self.bank() if normalizer is not None and normalizer.needs_bank else None
        with self.sealed(), gathered(self, self.encoder):
            self.evaluation = evaluator.evaluate(texts, text_index, videos, video_index, truth, normalizer, bank)
        if self.trainer.sanity_checking:
            return
        values = {f"{stage}/t2v_{name}": value for name, value in self.evaluation.text_to_video.items()}
        values |= {f"{stage}/v2t_{name}": value for name, value in self.evaluation.video_to_text.items()}
        values[f"{stage}/SumR"] = self.evaluation.sum_of_recalls
        for direction, found in self.evaluation.balance.items():
            short = "t2v" if direction == "text-to-video" else "v2t"
            values[f"{stage}/{short}_normalization_error"] = found.error
        # Every device holds all ranks, so the values are equal already: their largest is exact, their mean might round.
        logged = {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
        self.log_dict(logged, sync_dist=True, reduce_fx="max")


def _blank(batch: VideoBatch) -> VideoBatch:
    """Return a batch of one black video, of the sizes of a batch of none."""
    video = batch.video.apply(lambda t: t.new_full((1, *t.shape[1:]), t.dtype == torch.bool))
    return VideoBatch(video, batch.index.new_zeros(1), ["blank"])


def _plain(value: Any) -> Any:
    """Write options as recipes do, and name a normaliser, so that checkpoints hold no objects."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Kind):
        return {"class_path": f"{type(value).__module__}.{type(value).__name__}", "init_args": dict(vars(value))}
    return value.name if isinstance(value, Normalizer) else list(value) if isinstance(value, tuple) else value


def _in_memory(batches: list[tuple[Tensor, R]], device: torch.device) -> list[tuple[Tensor, R]]:
    """Gather one batch of the bank, or none, over devices and move it to main memory."""
    gathered = gather_batches(batches, device)
    return [] if gathered is None else [(gathered[0].cpu(), gathered[1].float().to("cpu"))]


def _distinct(batches: list[tuple[Tensor, R]], kind: type[R]) -> R:
    """Join batches, each item once."""
    if not batches:
        raise RuntimeError(f"the training split gave no {kind.__name__} for the bank of the score normalisation")
    _, rows = first_of_each(torch.cat([index for index, _ in batches]))
    return kind.cat([features for _, features in batches])[rows]


def _stacked(tensor: Tensor) -> Tensor:
    return gather_tensor(tensor.unsqueeze(0))


def first_of_each(index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values of `index` (N,), ascending, and the position (K,) where each occurs first."""
    values, inverse = index.unique(return_inverse=True)
    first = torch.full_like(values, len(index)).scatter_reduce(
        0, inverse, torch.arange(len(index), device=index.device), "amin"
    )
    return values, first
