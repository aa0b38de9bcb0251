"""X-CLIP as released, reimplemented from the specification of modeling_xclip.py: all similarities of every block.

Words are projected again in every block.
"""

from __future__ import annotations

import torch
from released_code import Sizes, Subject, away_from_start
from torch import Tensor, nn
from torch.nn.functional import normalize

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.xclip import XCLIPHead, XCLIPOptions


def attend(x: Tensor, matrix: Tensor) -> Tensor:
    """AOSM over the last dimension."""
    return ((x / 0.01).softmax(-1) @ matrix * x).sum(-1)


def released_block(head: XCLIPHead, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Score one block."""
    sentence, words = normalize(text.sentence, dim=-1), normalize(text.words, dim=-1)
    frames = normalize(video.frames, dim=-1)
    pooled = normalize(frames.mean(1), dim=-1)
    both = head.frame_word
    video_sentence = sentence @ head.global_matrix @ pooled.T
    video_word = (words.flatten(0, 1) @ pooled.T).view(*words.shape[:2], -1).transpose(1, 2)  # (N, M, W)
    video_word = attend(video_word, head.video_word.weight)
    sentence_frame = (sentence @ frames.flatten(0, 1).T).view(len(sentence), *frames.shape[:2])
    sentence_frame = attend(sentence_frame, head.sentence_frame.weight)
    matrix = (words @ head.local_matrix).flatten(0, 1) @ frames.flatten(0, 1).T
    matrix = matrix.view(*words.shape[:2], *frames.shape[:2])  # (N, W, M, F)
    by_frame = attend(matrix.permute(0, 2, 3, 1), both.words.weight)  # (N, M, F)
    by_word = attend(matrix, both.frames.weight)  # (N, W, M)
    frame_word = attend(by_frame, both.frames_after_words.weight)
    frame_word = (frame_word + attend(by_word.transpose(1, 2), both.words_after_frames.weight)) / 2
    return (video_sentence + video_word + sentence_frame + frame_word) / 4


def build(form: str, budget: int | None, sizes: Sizes) -> nn.Module:
    """Return a head."""
    torch.manual_seed(0)
    return away_from_start(XCLIPHead(sizes.dimension, sizes.words, sizes.frames, XCLIPOptions()))


SUBJECT = Subject(
    title="released",
    build=build,
    score=lambda head, text, video: head(text, video).similarity,
    released_block=released_block,  # type: ignore[arg-type]
    pair_numbers=lambda sizes: sizes.words * sizes.frames,
    pairs=256,
    dense_budgets=(),
)
