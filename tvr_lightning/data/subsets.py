"""Subsets of a training split: held-out videos for validation, and fewer videos for training."""

from __future__ import annotations

import numpy as np

from tvr_lightning.data.records import Split
from tvr_lightning.errors import UserError


def hold_out(train: Split, videos: int, seed: int, one_caption: bool) -> tuple[Split, Split]:
    """Divide a training split into a training and a validation split without shared videos.

    Args:
        train: Split to divide.
        videos: Number of video files to hold out; clips of one file are held out together.
        seed: Seed for selecting them.
        one_caption: Whether only the first text of a held-out video is kept, as in the test protocol.

    Returns:
        Remaining split, and the held-out videos as split "val" with an extended protocol.
    """
    files = list(dict.fromkeys(video.path for video in train.videos))
    count = len(files)
    if videos >= count:
        raise UserError(f"holdout {videos} leaves no training videos of {count}; hold out fewer")
    drawn = np.random.default_rng([seed, count]).permutation(count)[:videos].tolist()
    held_files = {files[index] for index in drawn}
    held = train.take_videos([i for i, video in enumerate(train.videos) if video.path in held_files])
    texts = [held.texts[indices[0]] for indices in held.texts_of_videos()] if one_caption else held.texts
    protocol = f"{train.protocol}, {videos} training videos held out"
    rest = train.take_videos([i for i, video in enumerate(train.videos) if video.path not in held_files])
    return rest, Split("val", protocol, held.videos, texts)


def draw_videos(split: Split, videos: int, seed: int) -> Split:
    """Return the split with `videos` of its videos, sampled with `seed`, in file order; unchanged if it has no more."""
    count = len(split.videos)
    if videos >= count:
        return split
    drawn = np.random.default_rng([seed, count, videos]).permutation(count).tolist()
    return split.take_videos(sorted(drawn[:videos]))
