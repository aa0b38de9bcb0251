"""UCoFiA's selection of a few patches per frame: a predictor of scores, and a differentiable top-k."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tvr_lightning.errors import UserError
from tvr_lightning.layers.one_hot import one_hot
from tvr_lightning.option_types import Count, Options, Positive

Predictor = Literal["train", "eval-t2v"]


@dataclass
class PatchSelection(Options):
    """Options of the patch selection (UCoFiA, section 3.3; modules/visual_token_selector.py of the training code).

    Training averages the selections of the k best under Gaussian noise.

    Attributes:
        kept: number k of patches per frame, in addition to CLS.
        samples: number of noise samples.
        sigma: standard deviation of the noise.
        noise_eval: also add noise in evaluation, as released; scores then change from run to run. Otherwise, the k
            largest scores are used, which is the limit of small noise.
        predictor: `train` for the predictor of the training code, or `eval-t2v` for the predictor of the text-to-video
            evaluation code, whose tensors have other shapes.
    """

    kept: Count = 3
    samples: Count = 500
    sigma: Positive = 0.05
    noise_eval: bool = False
    predictor: Predictor = "train"


class PatchScores(nn.Module):
    """Score (M, F, P) in (-1, 1) of each patch, given its frame (UCoFiA's `PredictorLG`).

    Args:
        dimension: Dimension D of the features.
        predictor: `train`: the patch and the frame's CLS separately pass LayerNorm, Linear(D, D/2) and GELU, and then
            both together two linear layers. `eval-t2v`: each patch is first concatenated with its CLS, and the second
            half is the sum over the frames of the output for CLS concatenated with itself.

    Raises:
        UserError: D is odd.
    """

    def __init__(self, dimension: int, predictor: Predictor = "train") -> None:
        super().__init__()
        if dimension % 2:
            raise UserError(f"the patch selector halves the dimension, so {dimension} must be even")
        self.predictor = predictor
        width = dimension if predictor == "train" else 2 * dimension
        inner = width // 2
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, inner, bias=False)
        self.joint = nn.Linear(2 * inner, inner, bias=False)
        self.out = nn.Linear(inner, 1, bias=False)
        for layer in (self.inner, self.joint, self.out):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, frames: Tensor, patches: Tensor) -> Tensor:
        """Return scores (M, F, P) for frames (M, F, D) and their patches (M, F, P, D)."""
        frame = frames.unsqueeze(2)
        if self.predictor == "train":
            local, whole = self._inner(patches), self._inner(frame)
        else:
            local = self._inner(torch.cat([patches, frame.expand_as(patches)], dim=-1))
            whole = self._inner(torch.cat([frame, frame], dim=-1)).sum(1, keepdim=True)
        joined = torch.cat([local, whole.expand_as(local)], dim=-1)
        return torch.tanh(self.out(nn.functional.gelu(self.joint(joined)))).squeeze(-1)

    def _inner(self, tokens: Tensor) -> Tensor:
        return nn.functional.gelu(self.inner(self.norm(tokens)))


class _PerturbedTopK(torch.autograd.Function):
    """Indicators of the k largest under noise, averaged over the samples.

    As released, the gradient of each position depends only on its own score: the diagonal of the Jacobian,
    E[1_p noise_q] / sigma.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, noise: Tensor, kept: int, sigma: float) -> Tensor:
        index = first_largest(scores.unsqueeze(-2) + sigma * noise, kept).sort(dim=-1).values  # (..., samples, k)
        means, slopes = [], []
        for place in range(kept):  # one position at a time, because all at once need k times the memory of the noise
            chosen = one_hot(index[..., place], scores.shape[-1], scores.dtype)
            means.append(chosen.mean(-2))
            slopes.append((chosen * noise).mean(-2) / sigma)
        ctx.save_for_backward(torch.stack(slopes, dim=-2))
        return torch.stack(means, dim=-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (gradients[0] * slope).sum(-2), None, None, None


def indicators(scores: Tensor, kept: int) -> Tensor:
    """Return one-hot rows (..., k, P) of the k largest of scores (..., P), in the order of the patches."""
    index = first_largest(scores, kept).sort(dim=-1).values
    return one_hot(index, scores.shape[-1], scores.dtype)


def perturbed_top_k(scores: Tensor, noise: Tensor, kept: int, sigma: float) -> Tensor:
    """Return rows (..., k, P): mean indicators of the k largest scores (..., P) under noise (..., samples, P)."""
    chosen: Tensor = _PerturbedTopK.apply(scores, noise, kept, sigma)
    return chosen


class PatchSelector(nn.Module):
    """Selection of CLS (M, F, D) and a few of the patches (M, F, P, D) of every frame.

    Args:
        dimension: Dimension D of the features.
        options: Options of the selection.
    """

    def __init__(self, dimension: int, options: PatchSelection) -> None:
        super().__init__()
        self.options = options
        self.scores = PatchScores(dimension, self.options.predictor)

    def forward(self, frames: Tensor, patches: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return CLS and the selected patches (M, F, 1 + k, D) of every frame, CLS first.

        Args:
            frames: CLS tokens (M, F, D).
            patches: Patches (M, F, P, D).
            noise: Standard normal noise (M, F, samples, P). Default: sampled if needed.

        Raises:
            UserError: There are fewer than k patches.
        """
        options = self.options
        if patches.shape[2] < options.kept:
            raise UserError(f"{patches.shape[2]} patches per frame, but patch_selection.kept {options.kept}; lower it")
        scores = self.scores(frames, patches)
        if noise is None and (self.training or options.noise_eval):
            noise = torch.randn(
                (*scores.shape[:2], options.samples, scores.shape[2]), dtype=scores.dtype, device=scores.device
            )
        if noise is None:
            chosen = indicators(scores, options.kept)
        else:
            chosen = perturbed_top_k(scores, noise, options.kept, options.sigma)
        return torch.cat([frames.unsqueeze(2), chosen @ patches], dim=2)


def first_largest(values: Tensor, count: int) -> Tensor:
    """Return positions (..., count) of the largest of (..., T), in decreasing order. Ties keep their order."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
