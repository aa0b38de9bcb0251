"""Parity cases of density-peak clustering and token merging as HBI releases them (models/cluster.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from parity.case import ParityCase
from torch import Tensor

from tvr_lightning.authors.names import load
from tvr_lightning.methods.dpdv.options import PatchMerging
from tvr_lightning.methods.dpdv.patch_merging import PatchMergingStage, dpc_knn

NAMES = {
    "ctm.conv.conv.": "scored.conv.",
    "ctm.norm.": "scored.norm.",
    "ctm.score.": "scored.score.",
    "block.norm1.": "attention.norm.",
    "block.attn.": "attention.",
}
CLUSTERS = re.compile(r"cluster_index\(cluster_num=(\d+),k=(\d+)\)")


def import_stage(checkpoint: Mapping[str, Tensor], source: str, options: PatchMerging) -> PatchMergingStage:
    """Build one stage of merging from HBI's `ctm` and `block`.

    Args:
        checkpoint: tensors by the authors' names; `block.norm1.weight` (D,) gives the width.
        source: the file, for the error.
        options: neighbours and heads; the rest is HBI's.

    Raises:
        CaseError: names are missing or unexpected.
    """
    dimension = len(checkpoint["block.norm1.weight"]) if "block.norm1.weight" in checkpoint else 1
    stage = PatchMergingStage(dimension, options)
    return load(stage, checkpoint, NAMES, source)


def compute_dpc_knn(case: ParityCase) -> dict[str, Tensor]:
    """Compute cluster indices, merged tokens and attended tokens (B, K, D) of a case with tokens (B, T, D)."""
    tokens, given = case.input("tokens"), case.config
    heads, ratio = int(given.get("num_heads", 8)), float(given.get("sample_ratio", 0.5))
    options = PatchMerging(
        ratio=ratio,
        stages=1,
        neighbours=int(given.get("k", 5)),
        density="hbi",
        weights="scored",
        heads=heads,
        keys="merged",
    )
    stage = import_stage(case.checkpoint, str(case.path), options)
    (clusters,) = options.schedule(tokens.shape[1])
    merged, _ = stage.merge(tokens, clusters)
    # The cases feed the merged tokens to the block as queries, keys and values at once.
    found = {
        f"ctm.merged_tokens(sample_ratio={ratio:g})": merged,
        f"block.tokens(num_heads={heads})": stage.attention(merged, merged),
    }
    for name in case.expected:
        if match := CLUSTERS.fullmatch(name):
            count, neighbours = int(match[1]), int(match[2])
            found[name] = dpc_knn(tokens, count, neighbours, "hbi").assignment
    return found
