"""The learnt temperature of CLIP."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


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
