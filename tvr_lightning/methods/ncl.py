"""NCL: Normalized Contrastive Learning for Text-Video Retrieval (Park et al., EMNLP 2022).

A loss and a test-time normalisation for any method's scores: Sinkhorn biases a_i for texts and b_j for videos make
every text and every video of a batch equally likely to be retrieved. The paper applies it to CLIP4Clip with mean
pooling, which is the default base. There is no public code; this follows the paper.

Deviations:
- Sinkhorn: paper on exp(S) (Fig. 4), which overflows float32 at CLIP's temperature of 0.01; here on logarithms, equal
  otherwise.
- gradient of the biases: paper not stated, Fig. 4 read literally differentiates them; here constants in the backward
  pass, which at convergence is exact (`detach_biases`).
- scope of the biases: paper a batch; here the whole gathered batch, not each device's part.
- queues: paper the last training queries; here what training produced, enqueued after each optimiser step, at first
  only as far as they are filled; `bank: training-split` encodes training texts and videos anew instead.
- test: paper biases from training queries, or from the test queries as an oracle (Table 5); here either or none, as
  `evaluation.normalization` says, with the four iterations and the learnt temperature of training.
- gradient of the loss: paper Eq. 28 lacks a factor; here, with the temperature,
  dL/db_j = -(1 - sum_i P_t2v(v_j | t_i)) / (2 B gamma).
- marginals: paper Eqs. 8 and 9 have them exchanged; here rows add up to 1/m, columns to 1/n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.normalization import Bank
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.queue import FeatureQueue
from tvr_lightning.layers.sinkhorn import sinkhorn_biases
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.clip4clip import CLIP4Clip
from tvr_lightning.training.distributed import Gather, gather_record
from tvr_lightning.training.optim import OptimizerConfig

BaseMethod = Callable[
    [Encoder, OptimizerConfig | None, EvaluationConfig | None, int, int, Gather],
    RetrievalModule,
]
"""A method's class, or a function that builds one from the six arguments that every method begins with."""


class EmptyQueueError(UserError, RuntimeError):
    """Training queries are wanted before there was any training."""


def normalized_logits(logits: Tensor, iterations: int = 4, detach: bool = True, scale: Tensor | float = 1.0) -> Tensor:
    """Add Sinkhorn's biases to logits: (<t_i, v_j> + a_i + b_j) / gamma (NCL, Eqs. 10 to 12 and Fig. 4).

    In the softmax over videos a_i cancels, in that over texts b_j does, so that one matrix serves both directions.

    Args:
        logits: (B, B) scores of B texts against their B videos, divided by gamma.
        iterations: of Sinkhorn's algorithm, at least 1.
        detach: take a and b as constants; otherwise the gradient runs through the iterations.
        scale: 1 / gamma that the logits were scaled by. With `detach`, a and b are constants on the scale of a cosine,
            so that the gradient of the temperature sees them.

    Returns:
        (B, B).

    Raises:
        ValueError: `iterations` is below 1, or there is nothing to balance.
    """
    text_bias, video_bias = sinkhorn_biases(logits.detach() if detach else logits, 1.0, iterations)
    biases = text_bias[:, None] + video_bias
    if detach and isinstance(scale, Tensor):
        biases = biases * (scale / scale.detach())
    return logits + biases


class NCL(RetrievalModule):
    """Normalised contrastive learning of any base method.

    Its contrastive loss sees the base method's logits with Sinkhorn's biases; other loss terms stay as they are. The
    last training texts and videos wait in queues for `SinkhornBias` at test, which recipes set as
    `evaluation.normalization`.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give.
        base: the method whose scores are normalised; it is built from the six arguments above.
        normalize_loss: whether training uses the biases; false trains the base method as it is and only fills the
            queues, for normalisation at test alone.
        iterations: of Sinkhorn's algorithm in the loss (paper: 4, the default).
        detach_biases: take the biases as constants in the backward pass; None is true.
        queue_size: K, training texts and training videos to keep (paper: 16384); 0 keeps none. A queue holds what the
            base method's `score` reads: for CLIP4Clip one vector each, for methods that read words and frames, these.
        bank: training queries at test come from the `queue`, or from the `training-split`, encoded anew with the final
            weights, at most `evaluation.bank_size`.

    Raises:
        ValueError: a value out of range, options of which one makes another senseless, or a base that is no method.
    """

    def __init__(
        self,
        encoder: Encoder,
        optimizer: OptimizerConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        words: int = 32,
        frames: int = 12,
        gather: Gather = "global",
        base: BaseMethod = CLIP4Clip,
        normalize_loss: bool = True,
        iterations: int | None = None,
        detach_biases: bool | None = None,
        queue_size: int = 16384,
        bank: Literal["queue", "training-split"] = "queue",
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather)
        if not normalize_loss and (iterations is not None or detach_biases is not None):
            raise ValueError("normalize_loss: false computes no biases in training; drop iterations and detach_biases")
        if iterations is not None and iterations < 1:
            raise ValueError(f"iterations is {iterations}; Sinkhorn needs at least 1")
        if queue_size < 0:
            raise ValueError(f"queue_size is {queue_size}; expected at least 0")
        if bank not in ("queue", "training-split"):
            raise ValueError(f"bank is {bank!r}; expected queue or training-split")
        normalizer = self.evaluation_config.normalization
        if bank == "queue" and not queue_size and normalizer is not None and normalizer.needs_bank:
            raise ValueError(
                f"{normalizer.name} needs training queries: set queue_size above 0, or bank: training-split"
            )
        self.iterations = iterations or 4
        self.detach_biases = detach_biases is not False
        self.bank_source = bank
        self.base = self._build(base)
        self.needs_patches = self.base.needs_patches
        self.protocol = self.base.protocol
        if normalize_loss:
            self.base.bias_logits = self._normalized
        self.text_queue = FeatureQueue(queue_size) if queue_size else None
        self.video_queue = FeatureQueue(queue_size) if queue_size else None

    def _build(self, method: BaseMethod) -> RetrievalModule:
        """Build the base method around this module's encoder and temperature, which stay registered once, here."""
        base = method(self.encoder, self.optimizer_config, self.evaluation_config, self.words, self.frames, self.gather)
        if not isinstance(base, RetrievalModule) or isinstance(base, NCL):
            raise ValueError(f"base is {type(base).__name__}; expected a retrieval method other than NCL")
        self.temperature = base.temperature
        for name in ("encoder", "temperature"):
            shared = getattr(base, name)
            delattr(base, name)
            # Past nn.Module, so that parameters and checkpoints name them once.
            object.__setattr__(base, name, shared)
        return base

    def _normalized(self, logits: Tensor) -> Tensor:
        self._loss_was_normalized = True
        return normalized_logits(logits, self.iterations, self.detach_biases, self.temperature())

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return the base method's terms, its contrastive ones on normalised logits (NCL, Sec. 3.3).

        Raises:
            TypeError: the base method's loss has no contrastive logits to normalise.
        """
        self._loss_was_normalized = False
        terms = self.base.losses(pairs)
        if self.base.bias_logits is not None and not self._loss_was_normalized:
            raise TypeError(
                f"{type(self.base).__name__}.losses passes no logits through contrastive_logits, so NCL cannot "
                "normalise them"
            )
        return terms

    def update_state(self, pairs: PairedFeatures) -> None:
        """Enqueue the step's texts and videos of all devices (NCL, Sec. 3.4)."""
        self.base.update_state(pairs)
        if self.text_queue is None or self.video_queue is None:
            return
        text, video = self.base.compact_text(pairs.text).float(), self.base.compact_video(pairs.video).float()
        if self.gather == "none":
            text, video = gather_record(text), gather_record(video)
        self.text_queue.push(text)
        self.video_queue.push(video)

    @property
    def reads_pairs(self) -> bool:
        """Whether there are queues to fill, or the base method keeps pairs itself."""
        return self.text_queue is not None or self.base.reads_pairs

    def bank(self) -> Bank:
        """Return the queues' texts and videos, or those of the training split encoded anew.

        Raises:
            EmptyQueueError: nothing was trained yet.
        """
        if self.bank_source == "training-split":
            return super().bank()
        if self.text_queue is None or self.video_queue is None or not len(self.text_queue):
            raise EmptyQueueError(
                "NCL's queues of training queries are empty: train first, test a checkpoint of a trained run, or set "
                "model.init_args.bank to training-split"
            )
        return Bank(self.text_queue.records(TextFeatures), self.video_queue.records(VideoFeatures))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Make room for the queues of a checkpoint; refuse checkpoints that do not fit."""
        for name, queue in (("text_queue.", self.text_queue), ("video_queue.", self.video_queue)):
            if queue is not None and "state_dict" in checkpoint:
                queue.adopt(checkpoint["state_dict"], name)
            elif queue is not None:  # ModelParallelStrategy has loaded the weights, but no new buffers
                saved = torch.load(str(self.trainer.ckpt_path), map_location="cpu", mmap=True, weights_only=True)
                weights = saved["state_dict"].items()
                queue.load_state_dict({key.removeprefix(name): value for key, value in weights if key.startswith(name)})
        super().on_load_checkpoint(checkpoint)

    # The base method's own

    @property
    def audio_encoder(self) -> AudioEncoder | None:
        """The base method's encoder of sound, where it hears."""
        return getattr(self.base, "audio_encoder", None)

    def text_features(self, batch: TextBatch) -> TextFeatures:
        """Encode N texts as the base method does."""
        return self.base.text_features(batch)

    def video_features(self, batch: VideoBatch) -> VideoFeatures:
        """Encode M videos as the base method does, sound included."""
        return self.base.video_features(batch)

    def pair_features(self, batch: PairBatch) -> PairedFeatures:
        """Encode this device's B pairs as the base method does."""
        return self.base.pair_features(batch)

    def encode_text(self, text: TextFeatures) -> TextFeatures:
        """Apply the base method's layers to N texts."""
        return self.base.encode_text(text)

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Apply the base method's layers to M videos."""
        return self.base.encode_video(video)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos as the base method does, without biases: `similarity` (N, M)."""
        return self.base.score(text, video)

    def score_as_released(self, text: TextFeatures, video: VideoFeatures, own_text: TextFeatures) -> Scores:
        """Score as the base method's released protocol does; ground truth leaks."""
        return self.base.score_as_released(text, video, own_text)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Keep what the base method's score reads of N texts."""
        return self.base.compact_text(text)

    def compact_video(self, video: VideoFeatures) -> VideoFeatures:
        """Keep what the base method's score reads of M videos."""
        return self.base.compact_video(video)

    def score_temperature(self) -> float:
        """Return the base method's gamma."""
        return self.base.score_temperature()
