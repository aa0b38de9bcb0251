"""GAID's released modules applied to every pair, reimplemented from clip_stochastic.py and its modules.

The released code fuses and pools each video for one text. Under the query protocol, every pair has its own fused
frames, so keys, values, the perturbation, and the cosine are computed for every pair.
"""

from __future__ import annotations

import math

import torch
from released_code import Sizes, Subject, away_from_start, of_form
from torch import Tensor, nn
from torch.nn.functional import normalize

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.gaid.model import GAIDHead
from tvr_lightning.methods.gaid.options import GAIDOptions
from tvr_lightning.methods.xpool import XPoolOptions


def released_block(head: GAIDHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block with every vector in full."""
    gate, attention, sentence, frames, audio = head.gate, head.attention, text.sentence, video.frames, video.audio
    assert gate is not None
    assert audio is not None
    assert head.radius is not None
    project = attention.cross_attn
    size = (len(sentence), *frames.shape)  # (N, M, F, D)
    parts = [frames.expand(size), audio.expand(size), sentence[:, None, None].expand(size)]
    listens = gate.linear(torch.cat(parts, dim=-1)).sigmoid()
    fused = listens * audio + (1 - listens) * frames
    query, context = project["q_proj"](attention.layer_norm1(sentence)), attention.layer_norm1(fused)
    keys, values = project["k_proj"](context), project["v_proj"](context)
    weights = (torch.einsum("nd,nmfd->nmf", query, keys) / math.sqrt(size[-1])).softmax(-1)
    hidden = attention.layer_norm2(project["out_proj"](torch.einsum("nmf,nmfd->nmd", weights, values)))
    pooled = attention.layer_norm3(hidden + attention.linear_proj(hidden))
    cosines = torch.einsum("nd,nmfd->nmf", normalize(sentence, dim=-1), normalize(fused, dim=-1))
    perturbed = sentence.unsqueeze(1) + head.alpha * head.radius(cosines).exp()
    return (normalize(perturbed, dim=-1) * normalize(pooled, dim=-1)).sum(-1)


def build(form: str, budget: int | None, sizes: Sizes) -> nn.Module:
    """Return a head of the given form, with the same parameters for every form."""
    torch.manual_seed(0)
    options = GAIDOptions(attention=XPoolOptions(dropout=0.0))
    return away_from_start(of_form(GAIDHead(sizes.dimension, sizes.frames, options), form, budget))


SUBJECT = Subject(
    title="released modules, every pair in full",
    build=build,
    score=lambda head, text, video: head(text, video).similarity,
    released_block=released_block,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: sizes.frames * sizes.dimension,
    pairs=512,
)
