"""UCoFiA as released, reimplemented from the specification of its training code: all similarities of every block.

Words and patches are projected again in every block.
"""

from __future__ import annotations

import torch
from released_code import Sizes, Subject, away_from_start
from torch import Tensor, nn
from torch.nn.functional import normalize

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.ucofia import UCoFiAHead, UCoFiAOptions

SCALE = torch.tensor(100.0)
PATCHES = 1 + UCoFiAOptions().patch_selection.kept


def interact(x: Tensor, matrix: Tensor) -> Tensor:
    """ISA over the last dimension."""
    return (((100 * x).softmax(-1) @ matrix * 100).softmax(-1) * x).sum(-1)


def released_block(head: UCoFiAHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block."""
    sentence, words = normalize(text.sentence, dim=-1), normalize(text.words, dim=-1)
    frames = normalize(video.frames, dim=-1)
    pooled = normalize(frames.mean(1), dim=-1)
    assert video.patches is not None
    assert head.patch_matrix is not None
    patches = video.patches.flatten(1, 2) @ head.patch_matrix
    video_sentence = sentence @ head.sentence_matrix @ (pooled @ head.video_matrix).T
    sentence_frame = interact(torch.einsum("nd,mfd->nmf", sentence, frames), head.sentence_frame.weight)
    matrix = (words @ head.word_matrix).flatten(0, 1) @ patches.flatten(0, 1).T
    matrix = matrix.view(*words.shape[:2], *patches.shape[:2])  # (N, W, M, patches)
    both = head.word_patch
    by_patch = interact(matrix.permute(0, 2, 3, 1), both.words.weight)  # (N, M, patches)
    by_word = interact(matrix, both.frames.weight)  # (N, W, M)
    word_patch = interact(by_patch, both.frames_after_words.weight)
    word_patch = (word_patch + interact(by_word.transpose(1, 2), both.words_after_frames.weight)) / 2
    return (video_sentence + sentence_frame + word_patch / SCALE) / 3


def build(form: str, budget: int | None, sizes: Sizes) -> nn.Module:
    """Return a head."""
    torch.manual_seed(0)
    return away_from_start(UCoFiAHead(sizes.dimension, sizes.words, sizes.frames, UCoFiAOptions()))


SUBJECT = Subject(
    title="released",
    build=build,
    score=lambda head, text, video: head(text, video, SCALE.to(text.sentence)).similarity,
    released_block=released_block,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: sizes.words * sizes.frames * PATCHES,
    pairs=256,
    dense_budgets=(),
)
