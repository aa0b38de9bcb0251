"""Modifications of a contrastive loss: changed logits, and stored training queries for evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.normalization import Bank
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures

Losses = Callable[[PairedFeatures], dict[str, Tensor]]


class EmptyQueueError(UserError):
    """Training queries are requested before any training."""


class ContrastiveLearning(nn.Module):
    """Contrastive loss without modification, the base class of modifications.

    Attributes:
        name: prefix of the method's name in tables; empty for this class.
        needs_all_logits: whether InfoNCE needs the logits of a whole batch, which excludes `gather: local`.
        remembers: whether `remember` stores features of a step's pairs.
    """

    name = ""
    needs_all_logits = False
    remembers = False

    def forward(self, logits: Tensor, temperature: Callable[[], Tensor]) -> Tensor:
        """Return the logits (B, B) for InfoNCE; `temperature` returns exp(logit_scale)."""
        return logits

    def terms(self, losses: Losses, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return the loss terms of B matching pairs by name. The method's loss must call `contrastive_logits`."""
        return losses(pairs)

    def check(self, evaluation: EvaluationConfig) -> None:
        """Reject an evaluation whose training queries are not available."""

    def remember(self, text: TextFeatures, video: VideoFeatures) -> None:
        """Store the compact features of a step's B texts and B videos from all devices."""

    def bank(self) -> Bank | None:
        """Return the stored training queries; None means to encode the training split."""
        return None

    def make_room(self, checkpoint: dict[str, Any], prefix: str, path: str | Path | None) -> None:
        """Resize the stored features to those of a checkpoint, read from `path`, which have names with a `prefix`."""
