"""Parity of ranks, recalls and score normalisation with the released evaluation codes (`metrics.safetensors`)."""

from __future__ import annotations

import re

import torch
from metric_rows import summarize
from parity.case import ParityCase
from torch import Tensor

from tvr_lightning.evaluation.normalization import DualSoftmax, QueryBankNorm, normalize_scores
from tvr_lightning.evaluation.ranks import Ranks, text_to_video_ranks, video_to_text_ranks

ROW = {"R1": "R@1", "R5": "R@5", "R10": "R@10", "MedianR": "MdR", "MeanR": "MnR"}
QUERY_BANK = re.compile(r"(qbnorm\.t2v\(k=(\d+),beta=([\d.]+)\))\.")


def compute_metrics(case: ParityCase) -> dict[str, Tensor]:
    """Compute the rows of a metrics case: plain, dual softmax, QB-Norm, and several captions per video.

    Recalls are in percent. `single.similarity` (N, N) is what DSL and QB-Norm start from; the released DSL of the
    direction video to text is the softmax over the videos.
    """
    single = case.input("single.similarity")
    own = torch.arange(len(single))
    dual = normalize_scores(DualSoftmax(), single)
    dual_videos = normalize_scores(DualSoftmax(), single.T, direction="video-to-text").T
    found = {"dsl.t2v.similarity": dual, "dsl.v2t.similarity": dual_videos}
    found |= _row("single.t2v", text_to_video_ranks(single, own))
    found |= _row("single.v2t", video_to_text_ranks(single, own))
    found |= _row("dsl.t2v", text_to_video_ranks(dual, own))
    found |= _row("dsl.v2t", video_to_text_ranks(dual_videos, own))
    for name, k, beta in sorted({match.groups() for match in map(QUERY_BANK.match, case.expected) if match}):
        normalizer = QueryBankNorm(beta=float(beta), k=int(k))
        banked = normalize_scores(normalizer, single, case.input("qbnorm.bank_similarity"))
        found |= {"qbnorm.similarity": banked} | _row(name, text_to_video_ranks(banked, own))
    several, owner = case.input("multi.similarity"), case.input("multi.caption_video")
    found |= _row("multi.t2v", text_to_video_ranks(several, owner))
    found |= _row("multi.v2t_clip4clip", video_to_text_ranks(several, owner))
    return found


def _row(name: str, ranks: Ranks) -> dict[str, Tensor]:
    row = summarize(ranks)
    return {f"{name}.{theirs}": torch.tensor([row[ours]], dtype=torch.float64) for theirs, ours in ROW.items()}
