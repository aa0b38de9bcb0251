"""What any method's contrastive loss may be given: other logits to see, and training queries to remember for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.normalization import Bank
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures

Losses = Callable[[PairedFeatures], dict[str, Tensor]]


class EmptyQueueError(UserError, RuntimeError):
    """Training queries are wanted before there was any training."""


class ContrastiveLearning(nn.Module):
    """Leaves a method's contrastive loss as it is, and remembers nothing; subclasses do otherwise.

    Attributes:
        name: prefix of the method's name in tables; empty for this one.
        needs_all_logits: whether InfoNCE must see the logits of a whole batch together, which `gather: local` excludes.
        remembers: whether `remember` keeps anything of a step's pairs.
    """

    name = ""
    needs_all_logits = False
    remembers = False

    def forward(self, logits: Tensor, temperature: Callable[[], Tensor]) -> Tensor:
        """Return what InfoNCE is to see of the logits (B, B) of B matching pairs.

        Args:
            logits: of B texts against their B videos.
            temperature: gives exp(logit_scale), a scalar.
        """
        return logits

    def terms(self, losses: Losses, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return a method's loss terms, scalars by name.

        Args:
            losses: of the method, which passes its logits through `contrastive_logits`.
            pairs: B matching pairs.

        Raises:
            TypeError: the loss has no logits for this contrast to work on.
        """
        return losses(pairs)

    def check(self, evaluation: EvaluationConfig) -> None:
        """Refuse an evaluation that asks for training queries which will not be there.

        Raises:
            ValueError: says which option to change.
        """

    def remember(self, text: TextFeatures, video: VideoFeatures) -> None:
        """Keep the compact features of a step's B texts and B videos, those of all devices."""

    def bank(self) -> Bank | None:
        """Return the training queries that were kept; None where they are to be encoded from the training split.

        Raises:
            EmptyQueueError: there are none yet.
        """
        return None

    def make_room(self, checkpoint: dict[str, Any], prefix: str, path: str | Path | None) -> None:
        """Make room for what a checkpoint remembers, so that its tensors fit.

        Args:
            checkpoint: about to be loaded.
            prefix: of this module's tensors in it.
            path: its file, from which strategies that shard weights have loaded them already.
        """
