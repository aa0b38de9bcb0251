"""DPDV's patch feature merging: cluster the patches of a frame, merge each cluster, look back at what was merged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from tvr_lightning.methods.dpdv.clustering import DensityRule, dpc_knn, merge_tokens

MergeWeights = Literal["mean", "scored"]
AttentionKeys = Literal["previous", "merged"]


@dataclass
class PatchMergingConfig:
    """How patches are merged (DPDV, section 3.3 and Table S10).

    Attributes:
        ratio: share of the patches that a stage keeps as centres, rounded up: .5 takes 49 to 25, 13, 7 and .75 to
            37, 28, 21. The paper's row ".25" (49 to 4, 1, 1) is not a quarter: .0625 gives it.
        stages: how often patches are merged.
        neighbours: k of the density. Not stated; TCFormer takes 5, HBI 3, and so it is 3 here.
        density: see `dpc_knn`; `paper` is the paper's formula.
        weights: `mean` of a cluster (the paper says "merge"), or `scored` as in HBI and TCFormer: tokens pass a
            convolution and a LayerNorm, and a learnt score weighs them.
        heads: of the attention; Eq. 8 shows one head, HBI has 8.
        keys: whether merged patches attend to the `previous` ones (the paper: "the original patch is used as key and
            value") or to the `merged` ones themselves (HBI's released code).

    Raises:
        ValueError: a value is out of its range.
    """

    ratio: float = 0.5
    stages: int = 3
    neighbours: int = 3
    density: DensityRule = "paper"
    weights: MergeWeights = "mean"
    heads: int = 8
    keys: AttentionKeys = "previous"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"patch_merging.ratio is {self.ratio}; it is the share of patches kept, in (0, 1]")
        for name in ("stages", "neighbours", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"patch_merging.{name} is {getattr(self, name)}; it must be at least 1")

    def schedule(self, patches: int) -> list[int]:
        """Return how many patches each stage leaves of `patches`: 49 at .5 gives [25, 13, 7]."""
        counts = []
        for _ in range(self.stages):
            # Tokens are few: 1e-9 takes back what .0625 or .1 lacks in binary, so that exact products stay whole.
            patches = max(math.ceil(patches * self.ratio - 1e-9), 1)
            counts.append(patches)
        return counts


class TokenAttention(nn.Module):
    """x + proj(attention(LN(x), LN(tokens))), one LayerNorm for both, no MLP (DPDV, Eq. 8; HBI's `TCBlock`).

    Args:
        dimension: D.
        heads: attention heads.

    Raises:
        ValueError: heads do not divide D.
    """

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        if dimension % heads:
            raise ValueError(f"patch_merging.heads is {heads}, which does not divide the dimension {dimension}")
        self.heads = heads
        self.norm = nn.LayerNorm(dimension)
        self.q = nn.Linear(dimension, dimension)
        self.kv = nn.Linear(dimension, 2 * dimension)
        self.proj = nn.Linear(dimension, dimension)

    def forward(self, merged: Tensor, tokens: Tensor) -> Tensor:
        """Return (B, K, D) for merged tokens (B, K, D), the queries, and tokens (B, T, D), keys and values."""

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

        key, value = self.kv(self.norm(tokens)).chunk(2, dim=-1)
        query = self.q(self.norm(merged))
        attended = nn.functional.scaled_dot_product_attention(split(query), split(key), split(value))
        return merged + self.proj(attended.transpose(-3, -2).flatten(-2))


class ScoredTokens(nn.Module):
    """Tokens through a convolution along the sequence, its input added, and a LayerNorm; and a score for each (HBI).

    Args:
        dimension: D, width of tokens (B, T, D).
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(dimension, dimension, kernel_size=3, padding=1, bias=False)
        self.norm = nn.LayerNorm(dimension)
        self.score = nn.Linear(dimension, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (B, T, D) and positive weights (B, T) for tokens (B, T, D)."""
        tokens = self.norm(self.conv(tokens.transpose(1, 2)).transpose(1, 2) + tokens)
        return tokens, self.score(tokens).squeeze(-1).exp()


class PatchMergingStage(nn.Module):
    """One stage: cluster, merge, attend; tokens (B, T, D) become (B, K, D).

    Args:
        dimension: D.
        config: all but `ratio` and `stages`.
    """

    def __init__(self, dimension: int, config: PatchMergingConfig) -> None:
        super().__init__()
        self.neighbours = config.neighbours
        self.density = config.density
        self.keys = config.keys
        self.scored = ScoredTokens(dimension) if config.weights == "scored" else None
        self.attention = TokenAttention(dimension, config.heads)

    def merge(self, tokens: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
        """Return merged tokens (B, K, D) and the tokens (B, T, D) that they were made of."""
        weight = None
        if self.scored is not None:
            tokens, weight = self.scored(tokens)
        found = dpc_knn(tokens, clusters, self.neighbours, self.density)
        return merge_tokens(tokens, found.assignment, clusters, weight), tokens

    def forward(self, tokens: Tensor, clusters: int) -> Tensor:
        """Return (B, K, D) for tokens (B, T, D) and K clusters."""
        merged, tokens = self.merge(tokens, clusters)
        return self.attention(merged, tokens if self.keys == "previous" else merged)


class PatchMerging(nn.Module):
    """All stages, each with parameters of its own; frames are independent of each other.

    Args:
        dimension: D, width of patches (M, F, P, D).
        config: switches.
    """

    def __init__(self, dimension: int, config: PatchMergingConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or PatchMergingConfig()
        self.stages = nn.ModuleList(PatchMergingStage(dimension, config) for _ in range(config.stages))

    def forward(self, patches: Tensor) -> Tensor:
        """Return (M, F, P', D) for patches (M, F, P, D); P' is the last of `config.schedule(P)`."""
        tokens = patches.flatten(0, 1)
        for stage, clusters in zip(self.stages, self.config.schedule(patches.shape[2]), strict=True):
            tokens = stage(tokens, clusters)
        return tokens.unflatten(0, patches.shape[:2])
