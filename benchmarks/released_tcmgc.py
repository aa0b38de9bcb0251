"""TC-MGC as released, reimplemented from the specification of modeling_tcmgc.py, lines 284-297.

Every word attends to the frames separately, every vector is computed in full, and all of this is done twice.
"""

from __future__ import annotations

import math

import torch
from released_code import Sizes, Subject, away_from_start, of_form
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.tcmgc.model import TCMGCHead
from tvr_lightning.methods.tcmgc.options import LanguageVideoAttention, TCMGCOptions

SCALE = torch.tensor(100.0)


def pool_frames(head: TCMGCHead, text: Tensor, frames: Tensor) -> Tensor:
    """Condition M videos (M, F, D) on one vector of each of N texts (N, D); return one vector per pair (N, M, D)."""
    attention = head.attention
    assert attention is not None
    query, context = attention.layer_norm1(text), attention.layer_norm1(frames)
    weights = (context @ query.T / math.sqrt(text.shape[-1])).softmax(1)  # (M, F, N)
    hidden = attention.layer_norm2((context.transpose(1, 2) @ weights).permute(0, 2, 1))  # (M, N, D)
    branch = dropout(attention.linear_proj(hidden), attention.dropout, attention.training)
    return attention.layer_norm3(hidden + branch).transpose(0, 1)


def interact(x: Tensor, matrix: Tensor, factor: float) -> Tensor:
    """ISA over the last dimension."""
    return (((factor * x).softmax(-1) @ matrix * factor).softmax(-1) * x).sum(-1)


def released_block(head: TCMGCHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block as the released forward pass does, word by word, with all vectors in full."""
    scores = released_scores(head, text, video)
    assert head.lsa is not None
    return ((SCALE * scores @ head.lsa.weight).softmax(-1) * scores).sum(-1)


def released_scores(head: TCMGCHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Return the four contrasts of one block, (N, M, 4)."""
    for _ in range(2):
        coarse = pool_frames(head, text.sentence, video.frames)
        fine = torch.stack([pool_frames(head, word, video.frames) for word in text.words.unbind(1)], dim=1)
    coarse, fine = normalize(coarse, dim=-1), normalize(fine, dim=-1)  # (N, M, D), (N, W, M, D)
    sentence, words = normalize(text.sentence, dim=-1), normalize(text.words, dim=-1)
    kept, factor = int(head.words * head.options.keep_rate), head.options.similarity_aggregation.softmax_lambda
    bidirectional = head.frame_word_aggregation
    video_sentence = torch.einsum("nd,nmd->nm", sentence @ head.global_matrix, coarse)
    video_word = torch.einsum("nwd,nmd->nmw", words, coarse).topk(kept, -1).values
    video_word = interact(video_word, head.video_word_aggregation.weight, factor)
    ordered = torch.einsum("nd,nwmd->nmw", sentence, fine).sort(-1, descending=True).values
    rest = ordered[..., kept:]
    fused = (rest.softmax(-1) * rest).sum(-1, keepdim=True)
    sentence_frame = torch.cat([ordered[..., :kept], fused], -1)
    sentence_frame = interact(sentence_frame, head.sentence_frame_aggregation.weight, factor)
    matrix = (words @ head.local_matrix).unsqueeze(1) @ fine.permute(0, 2, 3, 1)  # (N, M, words, frame slots)
    matrix = matrix.topk(kept, 2).values.topk(kept, 3).values
    by_frame = interact(matrix.transpose(2, 3), bidirectional.words.weight, factor)
    by_word = interact(matrix, bidirectional.frames.weight, factor)
    frame_word = interact(by_frame, bidirectional.frames_after_words.weight, factor)
    frame_word = (frame_word + interact(by_word, bidirectional.words_after_frames.weight, factor)) / 2
    return torch.stack([video_sentence, video_word, sentence_frame, frame_word], -1)


def build(form: str, budget: int | None, sizes: Sizes) -> nn.Module:
    """Return a head of the given form, with the same parameters for every form."""
    torch.manual_seed(0)
    options = TCMGCOptions(attention=LanguageVideoAttention(dropout=0.0))
    return away_from_start(of_form(TCMGCHead(sizes.dimension, sizes.words, sizes.frames, options), form, budget))


SUBJECT = Subject(
    title="released, word by word",
    build=build,
    score=lambda head, text, video: head(text, video, SCALE.to(text.sentence)).similarity,
    released_block=released_block,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: (1 + sizes.words) * sizes.dimension,
    pairs=128,
)
