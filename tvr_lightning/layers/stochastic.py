"""Text as a region rather than a point: radius, draws and support vector of T-MASS, which GAID takes over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.ranges import Count, Kind, Positive

RadiusKind = Literal["linear", "scalar"]
Trials = Count | Literal["mean"]


class Prior(Kind, ABC):
    """Distribution of the draws sigma, such as (B, D) (T-MASS, modules/stochastic_module.py)."""

    mean: float
    """Expectation of a draw."""

    @abstractmethod
    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Return draws of any shape on the CPU; from torch's global generator where none is given."""


class Uniform(Prior):
    """Draws from [0, 1), so that they are not centred (released default)."""

    mean = 0.5

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """See `Prior.draw`."""
        return torch.rand(shape, generator=generator)


class Normal(Prior):
    """Draws from N(0, std^2) (the papers).

    Args:
        std: standard deviation.
    """

    mean = 0.0

    def __init__(self, std: Positive = 1.0) -> None:
        self.std = std

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """See `Prior.draw`."""
        return self.std * torch.randn(shape, generator=generator)


def trial_draws(prior: Prior, trials: Trials, dimension: int, seed: int) -> Tensor:
    """Return the (K, D) draws that all pairs of an evaluation share, on the CPU.

    Args:
        prior: of the draws.
        trials: K; `mean` takes the prior's mean instead, once.
        dimension: D.
        seed: equal seeds give equal draws.
    """
    if trials == "mean":
        return torch.full((1, dimension), prior.mean)
    return prior.draw((trials, dimension), torch.Generator().manual_seed(seed))


class Radius(nn.Module):
    """How far a text reaches in every dimension, read off its similarities with the frames of a video.

    log R = W s + b over the F similarities (`linear`; T-MASS, `LinearCosRadius`): the weights begin as the first
    F rows of an identity, so that R is exp(s_f) in the first F dimensions and 1 elsewhere. Or log R = theta mean_f s_f,
    alike in all dimensions (`scalar`; an ablation of T-MASS).

    Args:
        frames: F, which `linear` is tied to.
        dimension: D.
        kind: one of both.
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
        """Return log R.

        The released code calls this the logarithm of a variance; the standard deviation is its exponential.

        Args:
            similarity: (..., F) cosines of a text with the frames of a video.
            frame_mask: (..., F), True where there is a frame; similarities with padding count as 0.

        Returns:
            (..., D).
        """
        if frame_mask is not None:
            similarity = similarity * frame_mask
        if self.linear_proj is not None:
            return self.linear_proj(similarity)
        assert self.theta is not None
        frames = similarity.shape[-1] if frame_mask is None else frame_mask.sum(-1, keepdim=True).clamp(min=1)
        mean = similarity.sum(-1, keepdim=True) / frames
        return (self.theta * mean).expand(*similarity.shape[:-1], self.dimension)


def support_text(text: Tensor, video: Tensor, log_radius: Tensor) -> Tensor:
    """Point at the edge of a text's region on the way to its video (T-MASS, trainer_stochastic.py).

    Args:
        text: (B, D).
        video: (B, D) vectors of the own videos.
        log_radius: (B, D).

    Returns:
        (B, D), t + (v - t) / |v - t| R.
    """
    return text + unit(video - text) * log_radius.exp()


def trial_cosines(text: Tensor, radius: Tensor, video: Tensor, draws: Tensor) -> Tensor:
    """Cosines of drawn texts t + sigma R with the vectors of every pair.

    Args:
        text: (N, D).
        radius: (M, N, D), R.
        video: (M, N, D), z.
        draws: (K, D) draws that all pairs share, or (M, K, N, D) draws of each pair.

    Returns:
        (M, K, N).
    """
    length = video.norm(dim=-1).clamp(min=COSINE_EPS).unsqueeze(1)  # (M, 1, N)
    if draws.ndim == 4:
        drawn = text + radius.unsqueeze(1) * draws
        products, square = (drawn * video.unsqueeze(1)).sum(-1), drawn.square().sum(-1)
    else:
        products = (text * video).sum(-1).unsqueeze(1) + ((radius * video) @ draws.T).transpose(1, 2)
        cross, own = (radius * text) @ draws.T, radius.square() @ draws.square().T
        square = text.square().sum(-1) + (2 * cross + own).transpose(1, 2)
    return products / (square.clamp(min=COSINE_EPS**2).sqrt() * length)


def drawn_text(text: Tensor, radius: Tensor, draws: Tensor, trial: Tensor) -> Tensor:
    """Return the text of the chosen trial of every pair.

    Args:
        text: (N, D).
        radius: (M, N, D).
        draws: (K, D) or (M, K, N, D), as for `trial_cosines`.
        trial: (M, N) int64.

    Returns:
        (M, N, D), t + sigma_trial R.
    """
    if draws.ndim == 2:
        return text + radius * draws[trial]
    index = trial[:, None, :, None].expand(-1, 1, -1, draws.shape[-1])
    return text + radius * draws.gather(1, index).squeeze(1)
