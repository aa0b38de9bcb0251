"""X-Pool as released, reimplemented from the specification of modules/transformer.py and modules/metrics.py.

Every text attends to the frames of every video, and W_O, FC, and both LayerNorms are applied to the vector of every
pair.
"""

from __future__ import annotations

import math

import torch
from released_code import Sizes, Subject, away_from_start, of_form
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.xpool import XPoolHead, XPoolOptions


def pool_frames(head: XPoolHead, sentence: Tensor, frames: Tensor) -> Tensor:
    """Pool M videos for each of N texts, (M, N, D)."""
    attention = head.attention
    project = attention.cross_attn
    query, context = project["q_proj"](attention.layer_norm1(sentence)), attention.layer_norm1(frames)
    keys, values = project["k_proj"](context), project["v_proj"](context)  # (M, F, D)
    weights = (keys @ query.T / math.sqrt(sentence.shape[-1])).softmax(1)  # (M, F, N)
    hidden = attention.layer_norm2(project["out_proj"](weights.transpose(1, 2) @ values))
    branch = dropout(attention.linear_proj(hidden), attention.dropout, attention.training)
    return attention.layer_norm3(hidden + branch)


def released_block(head: XPoolHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block with every vector in full."""
    pooled = normalize(pool_frames(head, text.sentence, video.frames), dim=-1)
    return torch.einsum("nd,mnd->nm", normalize(text.sentence, dim=-1), pooled)


def build(form: str, budget: int | None, sizes: Sizes) -> nn.Module:
    """Return a head of the given form, with the same parameters for every form."""
    torch.manual_seed(0)
    return away_from_start(of_form(XPoolHead(sizes.dimension, sizes.frames, XPoolOptions(dropout=0.0)), form, budget))


SUBJECT = Subject(
    title="released, every pair in full",
    build=build,
    score=lambda head, text, video: head(text, video).similarity,
    released_block=released_block,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: sizes.dimension,
    pairs=512,
)
