"""GARE as released, reimplemented from modeling.py, lines 184-206, and psi_module.py.

The gap, the query, and the increment are computed for every pair, the frames are projected again in every block, and
the output of `log_std_proj` is computed and discarded. The released evaluation uses blocks of 16 x 16.
"""

from __future__ import annotations

import math

import torch
from released_code import Sizes, Subject, away_from_start, of_form
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn.functional import dropout, normalize

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.gare.method import GARE
from tvr_lightning.methods.gare.model import GAREHead
from tvr_lightning.methods.gare.options import GapIncrement, GAREOptions, LogMeanExp, Variance
from tvr_lightning.training.losses import info_nce


def released_block(head: GAREHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block with every vector in full."""
    return released_pairs(head, text, video)[0]


def released_pairs(head: GAREHead, text: TextFeatures, video: VideoFeatures) -> tuple[Tensor, Tensor]:
    """Return the scores (N, M) of one block and its increments (N, M, D)."""
    psi, sentence, frames = head.psi, text.sentence, video.frames
    assert psi is not None
    weights = (torch.einsum("nd,mfd->nmf", sentence, frames) / 3).softmax(-1) * video.frame_mask
    pooled = torch.einsum("nmf,mfd->nmd", weights, frames)
    gap = frames.mean(1) - sentence.unsqueeze(1)
    query, context = psi.q_proj(psi.layer_norm1(gap)), psi.layer_norm1(frames)
    keys, values = psi.k_proj(context), psi.v_proj(context)
    attention = (torch.einsum("mfd,nmd->nmf", keys, query) / math.sqrt(sentence.shape[-1])).softmax(-1)
    hidden = psi.layer_norm2(psi.out_proj(torch.einsum("nmf,mfd->nmd", attention, values)))
    read = psi.layer_norm3(hidden + dropout(psi.linear1(hidden), psi.dropout, psi.training))
    increment = psi.mean_proj(read)
    psi.mean_proj(read)  # represents log_std_proj, which has the same shape
    return (normalize(sentence.unsqueeze(1) + increment, dim=-1) * normalize(pooled, dim=-1)).sum(-1), increment


def released_losses(method: GARE, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Return the loss of B matching pairs as in modeling.py (lines 208-259), with the directions text by text."""
    similarity, increment = released_pairs(method.head, text, video)
    options = method.options
    mean, deviation = increment.mean(0), increment.std(0) + 1e-6
    of_pairs = Independent(Normal(mean, deviation), 1)
    prior = Independent(Normal(torch.zeros_like(mean), torch.ones_like(deviation)), 1)
    bottleneck = kl_divergence(of_pairs, prior).mean()
    loss = info_nce(method.temperature() * similarity) + options.bottleneck.weight * bottleneck
    assert isinstance(options.direction, LogMeanExp)
    assert isinstance(options.norm_variance, Variance)
    agreements = []
    for directions in normalize(increment, dim=2):
        distance = 1 - directions @ directions.T
        agreements.append((torch.exp(-options.direction.alpha * distance).mean() + 1e-8).log())
    lengths = -increment.norm(dim=2).var(1).mean()
    loss = loss + options.direction.weight * torch.stack(agreements).mean()
    return loss + options.norm_variance.weight * torch.where(lengths >= -options.norm_variance.floor, lengths, 0.0)


def build(form: str, budget: int | None, sizes: Sizes) -> nn.Module:
    """Return a head of the given form, with the same parameters for every form."""
    torch.manual_seed(0)
    options = GAREOptions(increment=GapIncrement(dropout=0.0))
    return away_from_start(of_form(GAREHead(sizes.dimension, sizes.words, sizes.frames, options), form, budget))


SUBJECT = Subject(
    title="released, every pair in full",
    build=build,
    score=lambda head, text, video: head(text, video).similarity,
    released_block=released_block,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: sizes.dimension,
    pairs=512,
)
