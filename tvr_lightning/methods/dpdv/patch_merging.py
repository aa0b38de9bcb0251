"""DPDV's patch feature merging (section 3.3): cluster patches, merge each cluster, attend to the original patches."""

from torch import Tensor, nn

from tvr_lightning.errors import UserError
from tvr_lightning.methods.dpdv.clustering import dpc_knn, merge_tokens
from tvr_lightning.methods.dpdv.options import PatchMerging


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
        found = dpc_knn(tokens, clusters, self.options.neighbours, self.options.density)
        return merge_tokens(tokens, found.assignment, clusters, weight), tokens

    def forward(self, tokens: Tensor, clusters: int) -> Tensor:
        """Return (B, K, D) for tokens (B, T, D) and K clusters (Eq. 8)."""
        merged, tokens = self.merge(tokens, clusters)
        return self.attention(merged, tokens if self.options.keys == "previous" else merged)


class PatchFeatureMerging(nn.Module):
    """PFMM: all merging stages, each with its own parameters. Frames are independent of each other."""

    def __init__(self, dimension: int, options: PatchMerging | None = None) -> None:
        super().__init__()
        self.options = options = options or PatchMerging()
        self.stages = nn.ModuleList(PatchMergingStage(dimension, options) for _ in range(options.stages))

    def forward(self, patches: Tensor) -> Tensor:
        """Return (M, F, P', D) for patches (M, F, P, D); P' is the last value of `PatchMerging.schedule(P)`."""
        tokens = patches.flatten(0, 1)
        for stage, clusters in zip(self.stages, self.options.schedule(patches.shape[2]), strict=True):
            tokens = stage(tokens, clusters)
        return tokens.unflatten(0, patches.shape[:2])
