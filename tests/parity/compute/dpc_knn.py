"""Cases of density-peak clustering and token merging as HBI releases them (models/cluster.py)."""

import re

from tvr_lightning.authors.names import load
from tvr_lightning.methods.dpdv.options import PatchMerging
from tvr_lightning.methods.dpdv.patch_merging import PatchMergingStage, dpc_knn

NAMES = {
    "ctm.conv.conv.": "scored.conv.", "ctm.norm.": "scored.norm.", "ctm.score.": "scored.score.",
    "block.norm1.": "attention.norm.", "block.attn.": "attention.",
}  # fmt: skip


def compute_dpc_knn(case):
    tokens, given = case.inputs["tokens"], case.config  # (B, T, D)
    heads, ratio = int(given.get("num_heads", 8)), float(given.get("sample_ratio", 0.5))
    released = {"density": "hbi", "weights": "scored", "keys": "merged"}
    options = PatchMerging(ratio=ratio, stages=1, neighbors=int(given.get("k", 5)), heads=heads, **released)
    stage = PatchMergingStage(len(case.checkpoint["block.norm1.weight"]), options)
    load(stage, case.checkpoint, NAMES, str(case.path))
    (clusters,) = options.schedule(tokens.shape[1])
    merged, _ = stage.merge(tokens, clusters)
    # The cases feed the merged tokens to the block as queries, keys and values at once.
    found = {
        f"ctm.merged_tokens(sample_ratio={ratio:g})": merged,
        f"block.tokens(num_heads={heads})": stage.attention(merged, merged),
    }
    for name in case.expected:
        if match := re.fullmatch(r"cluster_index\(cluster_num=(\d+),k=(\d+)\)", name):
            found[name] = dpc_knn(tokens, int(match[1]), int(match[2]), "hbi").assignment
    return found
