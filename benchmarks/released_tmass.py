"""T-MASS as released, restated plainly from the specification of its trainer: trial after trial, every pair in full.

The released code draws anew for every pair; here, as in ours, all pairs share the draws, so that scores are the same.
"""

from __future__ import annotations

import torch
from released_code import Sizes, Subject, away_from_start, of_form
from released_xpool import pool_frames
from torch import Tensor, nn
from torch.nn.functional import normalize

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.tmass import TMASSHead, TMASSOptions
from tvr_lightning.methods.xpool import XPoolOptions

TRIALS = 20


def draws(dimension: int) -> Tensor:
    """Return the draws (K, D) of all pairs."""
    return torch.rand(TRIALS, dimension, generator=torch.Generator().manual_seed(0))


def released_block(head: TMASSHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block, every vector of every trial in full."""
    sentence, frames = text.sentence, video.frames
    pooled = normalize(pool_frames(head, sentence, frames), dim=-1)  # (M, N, D)
    cosines = torch.einsum("nd,mfd->mnf", normalize(sentence, dim=-1), normalize(frames, dim=-1))
    assert head.radius.linear_proj is not None
    radius = head.radius.linear_proj(cosines).exp()
    best = None
    for draw in draws(sentence.shape[-1]).to(sentence):
        drawn = normalize(sentence + draw * radius, dim=-1)
        cosine = (drawn * pooled).sum(-1)
        best = cosine if best is None else torch.maximum(best, cosine)
    assert best is not None
    return best.T


def build(form: str, budget: int | None, sizes: Sizes) -> nn.Module:
    """Return a head of the given form, with the same parameters for every form."""
    torch.manual_seed(0)
    options = TMASSOptions(attention=XPoolOptions(dropout=0.0))
    return away_from_start(of_form(TMASSHead(sizes.dimension, sizes.frames, options), form, budget))


SUBJECT = Subject(
    title="released, trial after trial",
    build=build,
    score=lambda head, text, video: head(text, video, draws(text.sentence.shape[-1]).to(text.sentence)).similarity,
    released_block=released_block,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: sizes.dimension,
    pairs=256,
)
