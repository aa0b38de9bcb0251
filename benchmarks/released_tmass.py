"""T-MASS as released, reimplemented from trainer/trainer_stochastic.py and modules/stochastic_module.py.

For every video and trial, the released code recomputes the radius of every text and draws new random numbers for every
pair (`SUBJECT`). Its scores change from run to run, with the same distribution as ours, which share the draws among all
pairs. `SHARED_DRAWS` is the same arithmetic with one radius and our draws, so its scores equal ours.
"""

from __future__ import annotations

import dataclasses

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


def radius_of(head: TMASSHead, sentence: Tensor, frames: Tensor) -> Tensor:
    """Return R (n, D) of n texts (n, D) and one video that is repeated for each text (n, F, D)."""
    assert head.radius.linear_proj is not None
    texts = normalize(sentence, dim=-1).unsqueeze(1).repeat(1, frames.shape[1], 1)
    cosines = (texts @ normalize(frames, dim=-1).transpose(1, 2)).mean(1)
    return head.radius.linear_proj(cosines).exp()


def released_block(head: TMASSHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block, video by video, with every vector of every trial in full."""
    sentence, columns = text.sentence, []
    for frames, pooled in zip(video.frames, pool_frames(head, sentence, video.frames), strict=True):
        repeated = frames.unsqueeze(0).tile(len(sentence), 1, 1)
        trials = [sentence + torch.rand_like(sentence) * radius_of(head, sentence, repeated) for _ in range(TRIALS)]
        columns.append((normalize(torch.stack(trials), dim=-1) * normalize(pooled, dim=-1)).sum(-1).amax(0))
    return torch.stack(columns, dim=1)


def block_of_shared_draws(head: TMASSHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block with every vector of every trial in full, but with a single radius and shared draws."""
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
    title="released, new draws for every pair and trial",
    build=build,
    score=lambda head, text, video: head(text, video, draws(text.sentence.shape[-1]).to(text.sentence)).similarity,
    released_block=released_block,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: TRIALS * sizes.dimension,
    pairs=256,
)
SHARED_DRAWS = dataclasses.replace(
    SUBJECT,
    title="released arithmetic, shared draws",
    released_block=block_of_shared_draws,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: sizes.dimension,
)
