"""DRL's weighted token-wise interaction as released, reimplemented from the specification of its code.

The weights of words and frames are recomputed in every block, and every similarity is multiplied by both masks.
"""

from __future__ import annotations

import torch
from released_code import Sizes, Subject, away_from_start
from torch import Tensor, nn
from torch.nn.functional import normalize

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.drl import DRLHead


def released_block(head: DRLHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block."""
    assert head.word_weights is not None
    assert head.frame_weights is not None
    words, frames = text.word_mask, video.frame_mask
    word_weights = head.word_weights(text.words).squeeze(2).masked_fill(~words, -torch.inf).softmax(-1)
    frame_weights = head.frame_weights(video.frames).squeeze(2).masked_fill(~frames, -torch.inf).softmax(-1)
    similarity = torch.einsum("nwd,mfd->nmwf", normalize(text.words, dim=-1), normalize(video.frames, dim=-1))
    similarity = torch.einsum("nmwf,nw->nmwf", similarity, words.to(similarity.dtype))
    similarity = torch.einsum("nmwf,mf->nmwf", similarity, frames.to(similarity.dtype))
    text_to_video = torch.einsum("nmw,nw->nm", similarity.amax(-1), word_weights)
    video_to_text = torch.einsum("nmf,mf->nm", similarity.amax(-2), frame_weights)
    return (text_to_video + video_to_text) / 2


def build(form: str, budget: int | None, sizes: Sizes) -> nn.Module:
    """Return a head."""
    torch.manual_seed(0)
    return away_from_start(DRLHead(sizes.dimension))


SUBJECT = Subject(
    title="released",
    build=build,
    score=lambda head, text, video: head(text, video).similarity,
    released_block=released_block,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: sizes.words * sizes.frames,
    pairs=256,
    dense_budgets=(),
)
