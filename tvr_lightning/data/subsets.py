"""Parts of a training split: videos held out to validate on, and fewer videos to train on."""

from __future__ import annotations

import numpy as np

from tvr_lightning.data.records import Split


def hold_out(train: Split, videos: int, seed: int, one_caption: bool) -> tuple[Split, Split]:
    """Divide a training split into one to train on and one to validate on, which share no video.

    Args:
        train: the split to divide.
        videos: Number of its video files held out, drawn by `seed`; clips of one file are held out together.
        seed: equal seeds draw equal videos.
        one_caption: whether the first text alone of a held-out video is kept, as the test protocol has it.

    Returns:
        The rest, and the held-out videos as a split "val" whose protocol says so.

    Raises:
        ValueError: no video would be left to train on.
    """
    files = list(dict.fromkeys(video.path for video in train.videos))
    count = len(files)
    if videos >= count:
        raise ValueError(f"holdout {videos} leaves no training videos of {count}; hold out fewer")
    drawn = np.random.default_rng([seed, count]).permutation(count).tolist()
    held_files = {files[position] for position in drawn[:videos]}
    held = train.take_videos([i for i, video in enumerate(train.videos) if video.path in held_files])
    texts = [held.texts[positions[0]] for positions in held.texts_of_videos()] if one_caption else held.texts
    protocol = f"{train.protocol}, {videos} training videos held out"
    rest = train.take_videos([i for i, video in enumerate(train.videos) if video.path not in held_files])
    return rest, Split("val", protocol, held.videos, texts)


def draw_videos(split: Split, videos: int, seed: int) -> Split:
    """Return the split of `videos` of its videos, drawn by `seed` and in file order; of all where it has no more."""
    count = len(split.videos)
    if videos >= count:
        return split
    drawn = np.random.default_rng([seed, count, videos]).permutation(count).tolist()
    return split.take_videos(sorted(drawn[:videos]))
