"""Mean pooling over valid frames."""

from __future__ import annotations

from torch import Tensor


def masked_mean(frames: Tensor, frame_mask: Tensor) -> Tensor:
    """Return the mean of the valid frames of each video (CLIP4Clip, `_mean_pooling_for_similarity_visual`).

    Args:
        frames: Frame vectors (M, F, D).
        frame_mask: Mask (M, F), True for valid frames.

    Returns:
        Means (M, D), zero for a video without frames.
    """
    mask = frame_mask.to(frames.dtype).unsqueeze(-1)
    return (frames * mask).sum(1) / mask.sum(1).clamp(min=1.0)
