"""DPDV's patch feature merging (section 3.3): cluster patches, merge each cluster, attend to the original patches.

Clustering is by density peaks with k nearest neighbors (DPC-KNN), as HBI and TCFormer merge tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tvr_lightning.errors import UserError
from tvr_lightning.layers.one_hot import one_hot
from tvr_lightning.layers.patch_selector import first_largest
from tvr_lightning.methods.dpdv.options import DensityRule, PatchMerging


class Clusters(NamedTuple):
    """Clusters of the tokens (..., T, D) of each set around K centers."""

    density: Tensor  # (..., T), larger for tokens with near neighbors
    delta: Tensor  # (..., T), distance to the nearest denser token
    center: Tensor  # (..., K) int64, positions of the centers, by decreasing density times delta
    assignment: Tensor  # (..., T) int64, position in `center` of the cluster of each token


@torch.no_grad()
def dpc_knn(tokens: Tensor, clusters: int, neighbors: int = 3, density: DensityRule = "paper") -> Clusters:
    """Cluster the tokens (..., T, D) of each set around K density peaks (Eq. 7 and the text around it).

    Centers are dense tokens far from all denser ones; every other token joins its nearest center. The first of several
    equal tokens counts, where the released codes add noise. Eq. 7 has its minimum and maximum over the wrong index: as
    in HBI and TCFormer (cluster.py), delta is the distance to the nearest token of strictly larger density, or the
    largest distance if there is none.
    """
    with torch.autocast(tokens.device.type, enabled=False):
        tokens = tokens.float() if tokens.dtype in (torch.float16, torch.bfloat16) else tokens
        # Exactly 0 for equal tokens, so that ties are not random.
        distance = torch.cdist(tokens, tokens, compute_mode="donot_use_mm_for_euclid_dist")
        if density == "hbi":
            distance = distance / math.sqrt(tokens.shape[-1])
        log_density = _log_density(distance, neighbors, density)
        denser = log_density.unsqueeze(-2) > log_density.unsqueeze(-1)  # [i, j]: j is denser than i
        largest = distance.amax((-2, -1)).unsqueeze(-1) if density == "hbi" else distance.amax(-1)
        nearest = distance.masked_fill(~denser, torch.inf).amin(-1)
        delta = torch.where(denser.any(-1), nearest, largest)
        center = first_largest(log_density + delta.log(), clusters)
        to_centers = distance.gather(-1, center.unsqueeze(-2).expand(*distance.shape[:-1], clusters))
        number = torch.arange(clusters, device=distance.device)
        assignment = torch.where(to_centers == to_centers.amin(-1, keepdim=True), number, clusters).amin(-1)
        # A center that is equal to another one keeps its own cluster.
        assignment = assignment.scatter(-1, center, number.expand_as(center))
        return Clusters(log_density.exp(), delta, center, assignment)


def _log_density(distance: Tensor, neighbors: int, rule: DensityRule) -> Tensor:
    count = distance.shape[-1]
    if rule == "neighbors" and count > 1:
        itself = torch.eye(count, dtype=torch.bool, device=distance.device)
        distance, count = distance.masked_fill(itself, torch.inf), count - 1
    nearest = distance.sort(dim=-1).values[..., : min(neighbors, count)]
    return -(nearest.square() if rule == "hbi" else nearest).mean(-1)


def merge_tokens(tokens: Tensor, assignment: Tensor, clusters: int, weight: Tensor | None = None) -> Tensor:
    """Return the mean token (..., K, D) of each cluster, with positive weights (..., T) or equal ones."""
    # A product with the memberships, because a scattered sum adds in random order on a GPU.
    with torch.autocast(tokens.device.type, enabled=False):
        member = one_hot(assignment, clusters, tokens.dtype)
        if weight is not None:
            member = member * weight.to(tokens.dtype).unsqueeze(-1)
        return (member / member.sum(-2, keepdim=True)).transpose(-2, -1) @ tokens


class TokenAttention(nn.Module):
    """x + proj(attention(LN(x), LN(tokens))), one LayerNorm for both, no MLP (Eq. 8; HBI's `TCBlock`)."""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        if dimension % heads:
            raise UserError(f"patch_reduction.heads is {heads}, which does not divide the dimension {dimension}")
        self.heads = heads
        self.norm = nn.LayerNorm(dimension)
        self.q = nn.Linear(dimension, dimension)
        self.kv = nn.Linear(dimension, 2 * dimension)
        self.proj = nn.Linear(dimension, dimension)

    def forward(self, merged: Tensor, tokens: Tensor) -> Tensor:
        """Return (B, K, D) for merged tokens (B, K, D), the queries, and tokens (B, T, D), the keys and values."""

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

        key, value = self.kv(self.norm(tokens)).chunk(2, dim=-1)
        query = self.q(self.norm(merged))
        attended = nn.functional.scaled_dot_product_attention(split(query), split(key), split(value))
        return merged + self.proj(attended.transpose(-3, -2).flatten(-2))


class ScoredTokens(nn.Module):
    """Residual convolution along the tokens with a LayerNorm, and a score for each token (HBI)."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(dimension, dimension, kernel_size=3, padding=1, bias=False)
        self.norm = nn.LayerNorm(dimension)
        self.score = nn.Linear(dimension, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (B, T, D) and positive weights (B, T)."""
        tokens = self.norm(self.conv(tokens.transpose(1, 2)).transpose(1, 2) + tokens)
        return tokens, self.score(tokens).squeeze(-1).exp()


class PatchMergingStage(nn.Module):
    """One merging stage: clustering, merging, and attention, from tokens (B, T, D) to (B, K, D)."""

    def __init__(self, dimension: int, options: PatchMerging) -> None:
        super().__init__()
        self.options = options
        self.scored = ScoredTokens(dimension) if options.weights == "scored" else None
        self.attention = TokenAttention(dimension, options.heads)

    def merge(self, tokens: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
        """Return merged tokens (B, K, D) and the tokens (B, T, D) that were merged (Eq. 7)."""
        weight = None
        if self.scored is not None:
            tokens, weight = self.scored(tokens)
        found = dpc_knn(tokens, clusters, self.options.neighbors, self.options.density)
        return merge_tokens(tokens, found.assignment, clusters, weight), tokens

    def forward(self, tokens: Tensor, clusters: int) -> Tensor:
        """Return (B, K, D) for tokens (B, T, D) and K clusters (Eq. 8)."""
        merged, tokens = self.merge(tokens, clusters)
        return self.attention(merged, tokens if self.options.keys == "previous" else merged)


class PatchFeatureMerging(nn.Module):
    """PFMM: all merging stages, each with its own parameters. Frames are independent of each other."""

    def __init__(self, dimension: int, options: PatchMerging) -> None:
        super().__init__()
        self.options = options
        self.stages = nn.ModuleList(PatchMergingStage(dimension, options) for _ in range(options.stages))

    def forward(self, patches: Tensor) -> Tensor:
        """Return (M, F, P', D) for patches (M, F, P, D); P' is the last value of `PatchMerging.schedule(P)`."""
        tokens = patches.flatten(0, 1)
        for stage, clusters in zip(self.stages, self.options.schedule(patches.shape[2]), strict=True):
            tokens = stage(tokens, clusters)
        return tokens.unflatten(0, patches.shape[:2])
