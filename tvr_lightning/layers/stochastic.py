"""Text as a region rather than a point: radius, samples, and support vector of T-MASS, also used by GAID."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.option_types import ConfigVariant, Count, Positive

RadiusKind = Literal["linear", "scalar"]
Trials = Count | Literal["mean"]


class Prior(ConfigVariant, ABC):
    """Distribution of the samples sigma, such as (B, D) (T-MASS, modules/stochastic_module.py)."""

    mean: ClassVar[float]
    """Expected value of a sample."""

    @abstractmethod
    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Return samples of any shape on the CPU. Default generator: torch's global generator."""


class Uniform(Prior):
    """Uniform distribution over [0, 1), which is not centered (released default)."""

    mean = 0.5

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Return uniform samples of any shape on the CPU."""
        return torch.rand(shape, generator=generator)


class Normal(Prior):
    """Normal distribution N(0, std^2) (the papers).

    Attributes:
        std: standard deviation.
    """

    mean = 0.0
    std: Positive = 1.0

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Return normal samples of any shape on the CPU."""
        return self.std * torch.randn(shape, generator=generator)


def trial_draws(prior: Prior, trials: Trials, dimension: int, seed: int) -> Tensor:
    """Return the samples (K, D) that all pairs of an evaluation share; for `mean`, the prior's mean (1, D)."""
    if trials == "mean":
        return torch.full((1, dimension), prior.mean)
    return prior.draw((trials, dimension), torch.Generator().manual_seed(seed))


class Radius(nn.Module):
    """Radius of the region of a text in every dimension, from its similarities with the frames of a video.

    `linear` (T-MASS, `LinearCosRadius`): log R = W s + b over the F similarities. The weights are initialized as the
    first F rows of an identity, so that R is exp(s_f) in the first F dimensions and 1 elsewhere. `scalar` (an ablation
    of T-MASS): log R = theta mean_f s_f, equal in all dimensions.

    Args:
        frames: Number of frames F, which `linear` requires.
        dimension: Dimension D.
        kind: Kind of the radius.
    """

    def __init__(self, frames: int, dimension: int, kind: RadiusKind = "linear") -> None:
        super().__init__()
        self.dimension = dimension
        self.linear_proj: nn.Linear | None = None
        self.theta: nn.Parameter | None = None
        if kind == "linear":
            self.linear_proj = nn.Linear(frames, dimension)
            nn.init.eye_(self.linear_proj.weight)
            nn.init.zeros_(self.linear_proj.bias)
        else:
            self.theta = nn.Parameter(torch.ones(1))

    def forward(self, similarity: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """Return log R (..., D).

        The released code calls it the logarithm of a variance, but its exponential is used as the standard deviation.

        Args:
            similarity: Cosines (..., F) of a text with the frames of a video.
            frame_mask: Mask (..., F), True for valid frames. Similarities with padding count as 0.
        """
        if frame_mask is not None:
            similarity = similarity * frame_mask
        if self.linear_proj is not None:
            return self.linear_proj(similarity)
        assert self.theta is not None
        frames = similarity.shape[-1] if frame_mask is None else frame_mask.sum(-1, keepdim=True).clamp(min=1)
        mean = similarity.sum(-1, keepdim=True) / frames
        return (self.theta * mean).expand(*similarity.shape[:-1], self.dimension)


def support_text(text: Tensor, video: Tensor, radius: Tensor) -> Tensor:
    """Return the point t + (v - t) / |v - t| R (B, D) on the edge of a text region (T-MASS, trainer_stochastic.py)."""
    return text + unit(video - text) * radius


def trial_cosines(text: Tensor, radius: Tensor, video: Tensor, draws: Tensor) -> Tensor:
    """Return the cosines (M, K, N) of sampled texts t + sigma R with the pooled videos z of every pair.

    Texts t are (N, D), R and z (M, N, D), and the samples sigma (K, D), which all pairs share.
    """
    draws = draws.to(text, non_blocking=True)
    products = (text * video).sum(-1).unsqueeze(1) + ((radius * video) @ draws.T).transpose(1, 2)
    cross, own = (radius * text) @ draws.T, radius.square() @ draws.square().T
    square = text.square().sum(-1) + (2 * cross + own).transpose(1, 2)
    length = video.norm(dim=-1).clamp(min=COSINE_EPS).unsqueeze(1)  # (M, 1, N)
    return products / (square.clamp(min=COSINE_EPS**2).sqrt() * length)
