"""The mean of what is there."""

from __future__ import annotations

from torch import Tensor


def masked_mean(frames: Tensor, frame_mask: Tensor) -> Tensor:
    """Mean of the real frames of each video (CLIP4Clip, `_mean_pooling_for_similarity_visual`).

    Args:
        frames: (M, F, D).
        frame_mask: (M, F), True where there is a frame.

    Returns:
        (M, D); zero for a video without frames.
    """
    mask = frame_mask.to(frames.dtype).unsqueeze(-1)
    return (frames * mask).sum(1) / mask.sum(1).clamp(min=1.0)
