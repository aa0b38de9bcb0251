"""The learnt temperature of CLIP."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Temperature(nn.Module):
    """CLIP's learnt inverse temperature exp(logit_scale), a scalar up to 100 (CLIP4Clip clamps after every step)."""

    def __init__(self, initial: float, maximum: float = math.log(100.0)) -> None:
        """Start at the log inverse temperature `initial`, ln 100 = 4.6052 in OpenAI's weights, and stay below a bound.

        Args:
            initial: that came with the weights.
            maximum: bound of the log inverse temperature; the weights of SigLIP lie above CLIP's.
        """
        super().__init__()
        self.maximum = maximum
        # One element, not zero dimensions: FSDP2 shards along the first dimension.
        self.logit_scale = nn.Parameter(torch.tensor([min(initial, self.maximum)]))

    def forward(self) -> Tensor:
        """Return exp(logit_scale), a scalar."""
        return self.logit_scale.exp().sum()  # of one element; a view would trouble FSDP2

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep the inverse temperature at or below its bound."""
        self.logit_scale.clamp_(max=self.maximum)
