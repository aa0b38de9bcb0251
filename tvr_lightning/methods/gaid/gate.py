"""GAID's gate: how much every frame of a video listens to its sound."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tvr_lightning.features import VideoFeatures


class Gate(nn.Module):
    """How much a frame listens: g = sigmoid(W [v; a; t] + b), f = g a + (1 - g) v (Eqs. 1-2).

    Frames v and their sounds a are (M, F, D), texts t (N, D).

    Args:
        dimension: D.
        level: a number per `frame`, per `sample` (from the means over the frames), or per dimension (`token`).
        text: whether the text has a say.
    """

    def __init__(self, dimension: int, level: Literal["sample", "frame", "token"], text: bool = True) -> None:
        super().__init__()
        self.dimension, self.level, self.text = dimension, level, text
        self.linear = nn.Linear((3 if text else 2) * dimension, dimension if level == "token" else 1)

    def of_video(self, video: VideoFeatures) -> Tensor:
        """Return what M videos add to the logits: (M, F, E), or (M, 1, E) for samples; E is 1, or D for tokens."""
        assert video.audio is not None  # the method asks for it
        both = torch.cat([video.frames, video.audio], dim=-1)
        if self.level == "sample":
            mask = video.frame_mask.to(both.dtype).unsqueeze(-1)
            both = (both * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return F.linear(both, self.linear.weight[:, : 2 * self.dimension], self.linear.bias)

    def of_text(self, text: Tensor) -> Tensor:
        """Return what N texts (N, D) add to the logits: (N, E)."""
        if not self.text:
            return text.new_zeros(len(text), self.linear.out_features)
        return F.linear(text, self.linear.weight[:, 2 * self.dimension :])
