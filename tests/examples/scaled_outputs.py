"""Training of one factor per output of the MLPs, after IA3 (Liu et al., NeurIPS 2022)."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.tuning import Tuning


class Factors(nn.Module):
    """Factors (rows, 1) of the rows of a weight (rows, columns), which start at 1."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(len(weight), 1))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the scaled weight."""
        return (weight * self.factors).to(weight.dtype)


class ScaledOutputs(Tuning):
    """Training of one factor per output of each MLP's linear layers, at `optimizer.lr`."""

    def apply(self, encoder: Encoder) -> None:
        """Freeze the encoder and add the factors."""
        encoder.requires_grad_(False)
        for block in (*encoder.blocks("text"), *encoder.blocks("video")):
            for layer in block.get_submodule("mlp").modules():
                if isinstance(layer, nn.Linear):
                    parametrize.register_parametrization(layer, "weight", Factors(layer.weight))
