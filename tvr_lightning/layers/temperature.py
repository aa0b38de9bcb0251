"""The learned temperature of CLIP."""

import math

import torch
from torch import Tensor, nn


class Temperature(nn.Module):
    """CLIP's learned inverse temperature exp(logit_scale), a scalar up to 100 (CLIP4Clip clamps after every step)."""

    def __init__(self, initial: float, maximum: float = math.log(100.0)) -> None:
        """Initialize the log inverse temperature, at most CLIP's bound ln 100, which SigLIP's weights exceed."""
        super().__init__()
        self.maximum = maximum
        # One element instead of zero dimensions, because FSDP2 shards along the first dimension.
        self.logit_scale = nn.Parameter(torch.tensor([min(initial, self.maximum)]))

    def forward(self) -> Tensor:
        """Return exp(logit_scale), a scalar."""
        return self.logit_scale.exp().sum()  # sum of one element, because FSDP2 does not support a view

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamp the inverse temperature to its bound."""
        self.logit_scale.clamp_(max=self.maximum)
