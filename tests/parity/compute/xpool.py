"""Cases of X-Pool's head."""

from __future__ import annotations

from parity.case import ParityCase
from parity.compute.features import case_attention, embedded, load_head
from torch import Tensor

from tvr_lightning.authors.names import XPOOL
from tvr_lightning.methods.xpool import XPoolHead


def compute_xpool(case: ParityCase) -> dict[str, Tensor]:
    """Compute cosines (N, M) and the pooled video (M, N, D) of every pair of an X-Pool case."""
    text, video = embedded(case)
    head = XPoolHead(text.sentence.shape[1], video.frames.shape[1], case_attention(case))
    load_head(head, case, XPOOL)
    pooled = head.pooled(*head.prepare(text, video)).materialize()
    return {
        "pooled_video(video,text)": pooled[:, :, 0].transpose(0, 1),
        "similarity": head(text, video).similarity,
    }
