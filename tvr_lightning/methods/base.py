"""Base class of all retrieval methods: encoding, training, evaluation, and prediction."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.tuning import FineTuning, Tuning
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.evaluator import SHORT, Evaluation
from tvr_lightning.evaluation.loop import Collection, encode_bank, evaluate, predict
from tvr_lightning.evaluation.normalization import Bank
from tvr_lightning.evaluation.restricted_trainer import RestrictedModule
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.temperature import Temperature
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.metrics import direction_metrics
from tvr_lightning.option_types import Count, Role
from tvr_lightning.training.distributed import (
    Gather,
    check_released_devices,
    gather_record,
    rank,
    released_parts,
    world_size,
)
from tvr_lightning.training.gradient_cache import encode_in_chunks
from tvr_lightning.training.losses import info_nce, local_info_nce
from tvr_lightning.training.module import RecipeModule
from tvr_lightning.training.optim import OptimizerConfig

Protocol = Annotated[Literal["query", "as-released"], Role.EVALUATION]
"""`query` conditions every video on the query; `as-released` reproduces evaluations that leak ground truth."""


class RetrievalModule(RestrictedModule, RecipeModule, ABC):
    """Base class of the methods: an encoder, a score for every text-video pair, and a loss over matching pairs.

    A method overrides `score` and, if needed, `encode_text`, `encode_video`, `losses`, and `update_state`. Scores and
    losses are computed in float32 with autocast off (float64 is kept), because bfloat16 changes scores by more than the
    difference between neighboring ranks.

    Args:
        encoder: encoder of texts and videos.
        optimizer: optimizer, learning rates, and schedule.
        evaluation: settings for turning scores into a results table.
        words: requested number of text positions, including SOT and EOT; W is at most the encoder's context length.
        frames: number of frames F per video.
        gather: negatives and gradients that are shared across devices (`tvr_lightning.training.distributed`).
        contrast: modification of the contrastive loss, such as `NCL`; None leaves the loss unmodified.
        tuning: choice of the encoder's weights that are trained, such as `LoRA`; None trains all of them.
        released_devices: number of devices of the published run, whose gradients `gather: own-slice` and `none` have on
            any number of devices; None uses those of this run.

    Attributes:
        needs_patches: whether `score` uses patches, which stored features must then contain.
        needs_frames: whether `score` needs several vectors per video.
        reads_padding: inputs (`words`, `frames`) whose padding affects the scores, as in some released code.
        averaged_parts: names of the parts whose mean is the score; empty if the score is not a mean.
        temporal: encoder that relates the frames of a video over time, if the method has one.
    """

    needs_patches = False
    needs_frames = True
    reads_padding: tuple[str, ...] = ()
    protocol: Protocol = "query"
    averaged_parts: Sequence[str] = ()

    def __init__(
        self,
        encoder: Encoder,
        optimizer: Annotated[OptimizerConfig | None, Role.TRAINING] = None,
        evaluation: Annotated[EvaluationConfig | None, Role.EVALUATION] = None,
        words: Annotated[int, Role.READING] = 32,
        frames: Annotated[int, Role.READING] = 12,
        gather: Gather = "global",
        contrast: ContrastiveLearning | None = None,
        tuning: Annotated[Tuning | None, Role.TRAINING] = None,
        released_devices: Annotated[Count | None, Role.TRAINING] = None,
    ) -> None:
        super().__init__(optimizer)
        self.contrast = contrast or ContrastiveLearning()
        check_released_devices(released_devices, gather)
        if gather == "local" and (type(self).losses is not RetrievalModule.losses or self.contrast.needs_all_logits):
            raise UserError(
                f"gather: local is only for InfoNCE over rows and columns, but the loss of {self.title} needs the "
                "scores of the whole batch. Use gather: global"
            )
        self.encoder = encoder
        self.tuning = tuning or FineTuning()
        self.tuning.apply(encoder)
        self.temporal: nn.Module | None = None
        self.evaluation_config = evaluation or EvaluationConfig()
        self.contrast.check(self.evaluation_config)
        if encoder.fixed_frames not in (None, frames):
            raise UserError(
                f"the encoder's token_merging needs {encoder.fixed_frames} frames per video, but frames is {frames}. "
                "Set both to the same number."
            )
        self.words = encoder.positions(words)
        self.frames = frames
        self.gather = gather
        self.released_devices = released_devices
        scale = encoder.initial_logit_scale()
        # Weights trained with a sigmoid loss, which have a bias, may exceed CLIP's bound on the scale.
        bound = {"maximum": scale} if encoder.initial_logit_bias() and scale > math.log(100.0) else {}
        self.temperature = Temperature(scale, **bound)
        config = self.evaluation_config
        names = [metric.name for metric in (*direction_metrics(config.recall), *config.metrics)]
        names += ["normalization_error"] if config.balance else []
        self.logged_metrics = [*(f"{short}_{name}" for short in SHORT.values() for name in names), "SumR"]
        self.resizes_buffers = self.contrast.remembers
        self.evaluation: Evaluation | None = None
        self.predictions: tuple[Tensor, Tensor, Tensor] | None = None  # texts (N,), best scores and videos (N, k)
        self._pairs: list[PairedFeatures] = []
        self.encoded = Collection()
        self._loss_alone = False

    @property
    @override
    def title(self) -> str:
        name = type(self).__name__
        return f"{self.contrast.name} on {name}" if self.contrast.name else name

    # Defined by the methods

    def encode_text(self, text: TextFeatures) -> TextFeatures:
        """Apply the method's own layers to N texts. The base class has none."""
        return text

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Apply the method's own layers to M videos. By default, the temporal encoder relates the frames (M, F, D)."""
        if self.temporal is None:
            return video
        return dataclasses.replace(video, frames=self.temporal(video.frames, video.frame_mask))

    @abstractmethod
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score N texts against M videos without knowledge of the matching pairs.

        Returns:
            `similarity` (N, M) on the scale of a cosine. Multiplied by exp(logit_scale), it gives the logits.
        """

    def score_as_released(self, text: TextFeatures, video: VideoFeatures, own_text: TextFeatures) -> Scores:
        """Score N texts against M videos conditioned on their own captions (`protocol: as-released`, which leaks)."""
        raise UserError(f"{type(self).__name__} has no released protocol. Use protocol: query")

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return the weighted loss terms of B matching pairs by name, without side effects. By default, InfoNCE."""
        logits = self.logits(self.score(pairs.text, pairs.video).similarity)
        return {"info_nce": info_nce(self.contrastive_logits(logits))}

    def local_losses(self, own: PairedFeatures, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return this device's share of `losses`, which is their mean, from its own and all pairs (`gather: local`)."""
        rows = self.logits(self.score(own.text, pairs.video).similarity)
        columns = self.logits(self.score(pairs.text, own.video).similarity)
        return {"info_nce": local_info_nce(rows, columns, rank() * len(own.text))}

    def diagnostics(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return further scalars of B matching pairs, which are logged every `log_every_n_steps`."""
        return {}

    def logits(self, similarity: Tensor) -> Tensor:
        """Return the InfoNCE logits for scores (N, M), same shape. By default, the scores times the temperature."""
        return self.temperature() * similarity

    def contrastive_logits(self, logits: Tensor) -> Tensor:
        """Apply the contrast, such as NCL, to the logits (B, B) of B matching pairs; every `losses` calls this."""
        return self.contrast(logits, self.temperature)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop features of N texts that `score` does not use, to keep banks and queues small. Default: none."""
        return text

    def compact_video(self, video: VideoFeatures) -> VideoFeatures:
        """Drop features of M videos that `score` does not use. Scores are unchanged. Default: none."""
        return video

    def score_temperature(self) -> float:
        """Return gamma = 1 / exp(logit_scale), by which the loss divides scores."""
        return 1.0 / float(self.temperature().detach())

    def update_state(self, pairs: PairedFeatures) -> None:
        """Update the contrast's queues with the gathered, detached pairs of a step, after each optimizer step.

        The pairs of all accumulated batches are passed in order, and only if `reads_pairs` is true.
        """
        if self.contrast.remembers:
            text, video = self.compact_text(pairs.text).float(), self.compact_video(pairs.video).float()
            if self.gather == "none":
                text, video = gather_record(text), gather_record(video)
            self.contrast.remember(text, video)

    @property
    def reads_pairs(self) -> bool:
        """Whether `update_state` uses the pairs of a step, which are then kept until the step."""
        return self.contrast.remembers or type(self).update_state is not RetrievalModule.update_state

    def encode_extras(self, batch: PairBatch) -> dict[str, Any]:
        """Return the extras of a batch for `PairedFeatures`: tensors with first dimension B."""
        return {name: value for name, value in batch.extras.items() if isinstance(value, Tensor)}

    # Encoding

    def text_features(self, batch: TextBatch) -> TextFeatures:
        """Encode N texts with the encoder and the method's layers."""
        trim = "words" not in self.reads_padding
        return self.encode_text(self.encoder.encode_text(batch.text, self.words, trim))

    def video_features(self, batch: VideoBatch) -> VideoFeatures:
        """Encode M videos with the encoder and the method's layers."""
        return self.encode_video(self.encoder.encode_video(batch.video, patches=self.needs_patches))

    def pair_features(self, batch: PairBatch) -> PairedFeatures:
        """Encode this device's B pairs, before gathering."""
        # The video first: a device computes it while the host prepares the text.
        video = self.video_features(batch.video)
        return PairedFeatures(
            text=self.text_features(batch.text),
            video=video,
            text_index=batch.text.index,
            video_index=batch.video.index,
            extras=self.encode_extras(batch),
        )

    # Training

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.contrast.make_room(checkpoint, "contrast.", getattr(self._trainer, "ckpt_path", None))
        super().on_load_checkpoint(checkpoint)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._pairs.clear()

    def training_step(self, batch: PairBatch, batch_idx: int) -> Tensor:
        """Encode and gather the pairs, log every loss term, and return their sum, a scalar."""
        self.encoded.skipped.update(batch.video.skipped)
        pairs, terms = self._loss_terms(batch)
        loss = self.total_loss(terms, batch)
        if self.reads_pairs:
            self._pairs.append(pairs.detach())
        of_parts = self.gather in ("local", "none") and world_size() > 1  # otherwise every device has the whole loss
        if len(terms) > 1:
            self.log_dict({f"train/{name}": term.detach() for name, term in terms.items()}, sync_dist=of_parts)
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=of_parts)
        self.log("train/temperature", self.temperature().detach())
        every = getattr(self._trainer, "log_every_n_steps", 0)
        if every and (self.global_step + 1) % every == 0:
            self.log_dict({f"train/{name}": value for name, value in self.diagnostics(pairs.float()).items()})
        return loss

    def _loss_terms(self, batch: PairBatch) -> tuple[PairedFeatures, dict[str, Tensor]]:
        """Encode and gather the pairs, and return them with the terms of their loss."""
        chunk = self.optimizer_config.gradient_cache if self.training else None
        encoded = encode_in_chunks(self.pair_features, batch, chunk) if chunk else self.pair_features(batch)
        pairs = gather_record(encoded, self.gather, self.released_devices)
        with torch.autocast(self.device.type, enabled=False):
            if self.gather == "local" and world_size() > 1:
                return pairs, self.local_losses(encoded.float(), pairs.float())
            if self.gather == "none" and self.released_devices:
                parts = released_parts(encoded.float(), self.released_devices)
                each = [self.contrast.terms(self.losses, part) for part in parts]
                return pairs, {name: torch.stack([part[name] for part in each]).mean(0) for name in each[0]}
            return pairs, self.contrast.terms(self.losses, pairs.float())

    @override
    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.temperature.clamp()
        if self._pairs:  # updated here, because callbacks save checkpoints at the end of the batch
            self.update_state(PairedFeatures.cat(self._pairs))
            self._pairs.clear()

    # Evaluation: Lightning hooks that call tvr_lightning/evaluation/loop.py

    @override
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TextVideoDataModule) and not isinstance(batch, PairBatch):
            truth = self._ground_truth("test" if self.trainer.testing or self.trainer.predicting else "val")
            truth.check_index(batch.index, "texts" if isinstance(batch, TextBatch) else "videos")

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @override
    def validation_step(
        self, batch: TextBatch | VideoBatch | PairBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if isinstance(batch, PairBatch):  # of a loader that is not of this project
            if not self._loss_alone:
                rank_zero_info("Only the loss is validated, because a loader of pairs has no ground truth to rank by.")
            self._loss_alone = True
            loss = torch.stack([*self._loss_terms(batch)[1].values()]).sum()
            name = "test/loss" if self.trainer.testing else "val/loss"
            self.log(name, loss, prog_bar=True, sync_dist=world_size() > 1, batch_size=len(batch.text))
            return
        # Words that no score uses would take most of the memory. Frames are kept whole for a first stage.
        self.encoded.add(self, batch, compact=isinstance(batch, TextBatch) and self.compacts_texts())

    def compacts_texts(self) -> bool:
        """Return False if a subclass has another `score`, which may use what the inherited `compact_text` drops."""
        score, compact = (
            next(cls for cls in type(self).__mro__ if name in vars(cls)) for name in ("score", "compact_text")
        )
        return issubclass(compact, score)

    test_step = validation_step

    @override
    def on_validation_epoch_start(self) -> None:
        self.encoded.clear()
        self._loss_alone = False

    on_test_epoch_start = on_validation_epoch_start
    on_predict_epoch_start = on_validation_epoch_start

    def on_predict_epoch_end(self) -> None:
        """Store the best videos of every text: text index (N,), scores (N, k), video index (N, k)."""
        self.predictions = predict(self, self.encoded.join(self.device), self._ground_truth("test"))

    def _ground_truth(self, stage: Literal["val", "test"]) -> GroundTruth:
        """Return the ground truth of the data module, or of a dataset of the current loaders."""
        trainer: Any = self.trainer
        if hasattr(trainer.datamodule, "ground_truth"):
            return trainer.datamodule.ground_truth(stage)
        loaders = trainer.val_dataloaders if stage == "val" else trainer.test_dataloaders or trainer.predict_dataloaders
        for loader in loaders if isinstance(loaders, list) else [loaders]:
            if isinstance(truth := getattr(getattr(loader, "dataset", None), "ground_truth", None), GroundTruth):
                return truth
        raise UserError(
            "The loaders of texts and videos have no ground truth. Set the attribute ground_truth of one of their "
            "datasets to a GroundTruth, or validate only the loss with a loader of PairBatch."
        )

    def _evaluate(self, stage: Literal["val", "test"]) -> None:
        if self._loss_alone:
            return
        split = self.encoded.join(self.device)
        truth = self._ground_truth(stage)
        found = self.evaluation = evaluate(self, split, truth, self.trainer.sanity_checking)
        values = {f"t2v_{name}": value for name, value in found.text_to_video.items()}
        values |= {f"v2t_{name}": value for name, value in found.video_to_text.items()} | {"SumR": found.sum_of_recalls}
        values |= {f"{SHORT[direction]}_normalization_error": each.error for direction, each in found.balance.items()}
        logged = {f"{stage}/{name}": torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        logged = {name: value.to(self.device) for name, value in logged.items()}
        self.log_dict(logged, sync_dist=True, reduce_fx="max")  # equal on all devices

    def bank(self) -> Bank:
        """Return training texts and videos that represent user queries in score normalization."""
        kept = self.contrast.bank()
        return encode_bank(self, self.trainer, self.encoded.skipped) if kept is None else kept
