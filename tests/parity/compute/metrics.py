"""Cases of ranks, recalls (in percent) and score normalization of the released evaluation codes."""

import re

import torch
from metric_rows import summarize

from tvr_lightning.evaluation.normalization import DualSoftmax, QueryBankNorm, normalize_scores
from tvr_lightning.ranks import text_to_video_ranks, video_to_text_ranks

ROW = {"R1": "R@1", "R5": "R@5", "R10": "R@10", "MedianR": "MdR", "MeanR": "MnR"}
QUERY_BANK = re.compile(r"(qbnorm\.t2v\(k=(\d+),beta=([\d.]+)\))\.")


def compute_metrics(case):
    """DSL and QB-Norm start from `single.similarity` (N, N); DSL from video to text is the softmax over the videos."""
    single = case.inputs["single.similarity"]
    own = torch.arange(len(single))
    dual = normalize_scores(DualSoftmax(), single)
    dual_videos = normalize_scores(DualSoftmax(), single.T, direction="video-to-text").T
    several, owner = case.inputs["multi.similarity"], case.inputs["multi.caption_video"]
    found = {"dsl.t2v.similarity": dual, "dsl.v2t.similarity": dual_videos}
    ranks = {
        "single.t2v": text_to_video_ranks(single, own),
        "single.v2t": video_to_text_ranks(single, own),
        "dsl.t2v": text_to_video_ranks(dual, own),
        "dsl.v2t": video_to_text_ranks(dual_videos, own),
        "multi.t2v": text_to_video_ranks(several, owner),
        "multi.v2t_clip4clip": video_to_text_ranks(several, owner),
    }
    for name, k, beta in sorted({match.groups() for match in map(QUERY_BANK.match, case.expected) if match}):
        normalizer = QueryBankNorm(beta=float(beta), k=int(k))
        found["qbnorm.similarity"] = normalize_scores(normalizer, single, case.inputs["qbnorm.bank_similarity"])
        ranks[name] = text_to_video_ranks(found["qbnorm.similarity"], own)
    rows = {name: summarize(of) for name, of in ranks.items()}
    return found | {
        f"{name}.{theirs}": torch.tensor([row[ours]], dtype=torch.float64)
        for name, row in rows.items()
        for theirs, ours in ROW.items()
    }
