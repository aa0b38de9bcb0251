"""Cases of X-Pool's head."""

from __future__ import annotations

from parity.case import ParityCase
from parity.compute.features import case_attention, embedded, load_head
from torch import Tensor

from tvr_lightning.authors.xpool import NAMES
from tvr_lightning.methods.xpool import XPoolConfig, XPoolHead


def compute_xpool(case: ParityCase) -> dict[str, Tensor]:
    """Compute cosines (N, M) and the pooled video (M, N, D) of every pair of an X-Pool case."""
    text, video = embedded(case)
    head = load_head(XPoolHead(text.sentence.shape[1], XPoolConfig(attention=case_attention(case))), case, NAMES)
    pooled = head.pool(head.prepared(text), video.frames, video.frame_mask).materialize()
    return {
        "pooled_video(video,text)": pooled[:, :, 0].transpose(0, 1),
        "similarity": head(text, video).similarity,
    }
