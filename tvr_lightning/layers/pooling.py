"""Mean pooling over valid frames."""

from torch import Tensor


def masked_mean(frames: Tensor, frame_mask: Tensor) -> Tensor:
    """Return the mean (M, D) of the valid frames (CLIP4Clip, `_mean_pooling_for_similarity_visual`), 0 without any."""
    mask = frame_mask.to(frames.dtype).unsqueeze(-1)
    return (frames * mask).sum(1) / mask.sum(1).clamp(min=1.0)
