"""The LightningModule that every paper extends: encoding, training, evaluation, prediction."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.evaluator import Evaluation
from tvr_lightning.evaluation.loop import Collection, encode_bank, evaluate, log_values, predict
from tvr_lightning.evaluation.normalization import Bank
from tvr_lightning.evaluation.sealed import SealedModule
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.temperature import Temperature
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.training.distributed import Gather, gather_record, rank, world_size
from tvr_lightning.training.gradient_cache import encode_in_chunks
from tvr_lightning.training.losses import info_nce, local_info_nce
from tvr_lightning.training.module import RecipeModule
from tvr_lightning.training.optim import OptimizerConfig

Protocol = Literal["query", "as-released"]
"""`query` scores every video as the query asks; `as-released` reproduces evaluations that leak ground truth."""


class RetrievalModule(SealedModule, RecipeModule, ABC):
    """What the five papers share: an encoder, a scoring function over all pairs, a loss over matching pairs.

    A method overrides `score`, and where its paper does so `encode_text`, `encode_video`, `losses` and `update_state`.
    Scores and losses are computed in float32 with autocast off (float64 stays): bfloat16 moves scores by more than
    neighbouring ranks differ.

    Args:
        encoder: encoder of texts and videos.
        optimizer: optimizer, learning rates, and schedule.
        evaluation: settings for turning scores into a results table.
        words: requested number of text positions, including SOT and EOT; W is at most the encoder's context length.
        frames: number of frames F per video.
        gather: negatives and gradients that are shared over devices (`tvr_lightning.training.distributed`).
        contrast: modification of the contrastive loss, such as `NCL`; None does not modify it.

    Raises:
        ValueError: `gather: local` with a loss that needs all scores together.

    Attributes:
        needs_patches: whether `score` reads patches, which stored features must then contain.
        reads_padding: whose padding, of `words` or `frames`, enters the scores, as in some released codes.
        protocol: evaluation protocol of the method.
        averaged_parts: names of the parts whose mean is the score; empty if the score is not a mean.
    """

    needs_patches = False
    reads_padding: tuple[str, ...] = ()
    protocol: Protocol = "query"
    averaged_parts: Sequence[str] = ()

    def __init__(
        self,
        encoder: Encoder,
        optimizer: OptimizerConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        words: int = 32,
        frames: int = 12,
        gather: Gather = "global",
        contrast: ContrastiveLearning | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.contrast = contrast or ContrastiveLearning()
        if gather == "local" and (type(self).losses is not RetrievalModule.losses or self.contrast.needs_all_logits):
            raise ValueError(
                f"gather: local is only for InfoNCE over rows and columns, but the loss of {self.title} needs the "
                "scores of the whole batch. Use gather: global"
            )
        self.encoder = encoder
        self.evaluation_config = evaluation or EvaluationConfig()
        self.contrast.check(self.evaluation_config)
        self.words = encoder.positions(words)
        self.frames = frames
        self.gather = gather
        scale = encoder.initial_logit_scale()
        # Weights trained with a sigmoid, which have a bias, were not held below CLIP's bound; others are.
        bound = {"maximum": scale} if encoder.initial_logit_bias() and scale > math.log(100.0) else {}
        self.temperature = Temperature(scale, **bound)
        self.evaluation: Evaluation | None = None
        self.predictions: tuple[Tensor, Tensor, Tensor] | None = None
        self._pairs: list[PairedFeatures] = []
        self.encoded = Collection()

    @property
    def title(self) -> str:
        """Name in tables, such as `CLIP4Clip`, or `NCL on CLIP4Clip` with that contrast."""
        name = type(self).__name__
        return f"{self.contrast.name} on {name}" if self.contrast.name else name

    # What a paper defines

    def encode_text(self, text: TextFeatures) -> TextFeatures:
        """Apply the method's own per-text layers to N texts; the base method has none."""
        return text

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Apply the method's own per-video layers to M videos; the base method has none."""
        return video

    @abstractmethod
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos, no pairing known.

        Returns:
            `similarity` (N, M) on the scale of a cosine: times exp(logit_scale) it gives the logits.
        """

    def score_as_released(self, text: TextFeatures, video: VideoFeatures, own_text: TextFeatures) -> Scores:
        """Score N texts against M videos that are told their own captions, as two released evaluations do (leaks).

        Only `protocol: as-released` calls it; everything it yields is marked "leaks ground truth".

        Args:
            text: N texts.
            video: M videos.
            own_text: the caption of each of the M videos.
        """
        raise TypeError(f"{type(self).__name__} has no released protocol. Use protocol: query")

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

        Every method's `losses` passes its logits through here, so that any of them can be given a contrast.
        """
        return self.contrast(logits, self.temperature)

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
        """Called once after every optimiser step with the step's gathered, detached pairs; fills the contrast's queues.

        Those of all batches that the step accumulated, in their order; they are kept only where `reads_pairs`.
        """
        if self.contrast.remembers:
            text, video = self.compact_text(pairs.text).float(), self.compact_video(pairs.video).float()
            if self.gather == "none":
                text, video = gather_record(text), gather_record(video)
            self.contrast.remember(text, video)

    @property
    def reads_pairs(self) -> bool:
        """Whether `update_state` does anything with a step's pairs, so that they must be kept for it."""
        return self.contrast.remembers or type(self).update_state is not RetrievalModule.update_state

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

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Make room for the queues of a checkpoint; refuse checkpoints that do not fit.

        Raises:
            CheckpointError: another method's checkpoint, or tensors that are missing, unexpected or of another shape.
        """
        self.contrast.make_room(checkpoint, "contrast.", getattr(self._trainer, "ckpt_path", None))
        super().on_load_checkpoint(checkpoint)

    def on_train_start(self) -> None:
        """Forget the pairs of a step that an interrupted run in this process left unfinished."""
        super().on_train_start()
        self._pairs.clear()

    def training_step(self, batch: PairBatch, batch_idx: int) -> Tensor:
        """Encode, gather, and return the sum of the loss terms, a scalar; every term is logged."""
        self.encoded.skipped.update(batch.video.skipped)
        chunk = self.optimizer_config.gradient_cache
        encoded = encode_in_chunks(self.pair_features, batch, chunk) if chunk else self.pair_features(batch)
        pairs = gather_record(encoded, self.gather)
        with torch.autocast(self.device.type, enabled=False):
            local = self.gather == "local" and world_size() > 1
            if local:
                terms = self.local_losses(encoded.float(), pairs.float())
            else:
                terms = self.contrast.terms(self.losses, pairs.float())
        loss = self.total_loss(terms, batch)
        if self.reads_pairs:
            self._pairs.append(pairs.detach())
        of_parts = self.gather in ("local", "none") and world_size() > 1  # else every device has the whole loss
        if len(terms) > 1:
            self.log_dict({f"train/{name}": term.detach() for name, term in terms.items()}, sync_dist=of_parts)
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=of_parts)
        self.log("train/temperature", self.temperature().detach())
        return loss

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

    # Evaluation: the loop of tvr_lightning/evaluation/loop.py, where Lightning calls it

    def validation_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Encode one batch of unique texts or unique videos; scoring waits for the end of the epoch."""
        self.encoded.add(self, batch)

    test_step = validation_step

    def predict_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Encode one batch; returns its (N,) or (M,) indices, since Lightning expects a value."""
        self.validation_step(batch, batch_idx, dataloader_idx)
        return batch.index

    def on_validation_epoch_start(self) -> None:
        """Forget what an earlier evaluation encoded."""
        self.encoded.clear()

    on_test_epoch_start = on_validation_epoch_start
    on_predict_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Score all pairs and log the table."""
        self._evaluate("val")

    def on_test_epoch_end(self) -> None:
        """Score all pairs and log the table."""
        self._evaluate("test")

    def on_predict_epoch_end(self) -> None:
        """Keep the best videos of every text: text index (N,), scores (N, k), video index (N, k)."""
        self.predictions = predict(self, self.encoded.join(self.device))

    def _evaluate(self, stage: Literal["val", "test"]) -> None:
        split = self.encoded.join(self.device)
        truth = self.trainer.datamodule.ground_truth(stage)  # type: ignore[attr-defined]
        self.evaluation = evaluate(self, split, truth, self.trainer.sanity_checking)
        if not self.trainer.sanity_checking:
            log_values(self, stage, self.evaluation.values())

    def bank(self) -> Bank:
        """Return training texts and videos that stand for users' queries in score normalisation."""
        kept = self.contrast.bank()
        return encode_bank(self, self.trainer, self.encoded.skipped) if kept is None else kept

    @property
    def skipped(self) -> list[str]:
        """Files that could not be read so far, each with its reason, over all devices."""
        return self.encoded.skipped_anywhere()
