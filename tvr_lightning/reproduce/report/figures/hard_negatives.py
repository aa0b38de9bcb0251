"""Gap between the score of a text's own video and those of the hardest other videos (GARE, Fig. 6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tvr_lightning.reproduce.report.drawing import COLORS, Arrays, Chart, drawings, new_panels
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit

HARDEST = 10


@torch.no_grad()
def measure_hard_negatives(encoded: EncodedSplit) -> Arrays:
    """Return the gaps `plain` without increments and `corrected` with them, (B, K) for the K hardest other videos.

    The hardest videos are those with the highest scores without increments.
    """
    head, (text, video) = encoded.module.head, encoded.paired()
    sentences, means = head.of_texts(text.sentence, len(video)), head.of_videos(head.mean_frames(video), len(text))
    plain = sentences.cosine(head.pooled(sentences, means, video))[..., 0].T
    scores = {"plain": plain, "corrected": encoded.module.score(text, video).similarity}
    hardest = plain.masked_fill(torch.eye(len(plain), dtype=torch.bool, device=plain.device), -torch.inf)
    hardest = hardest.topk(min(HARDEST, len(plain) - 1)).indices
    return {
        name: (each.diagonal()[:, None] - each.gather(1, hardest)).double().cpu().numpy()
        for name, each in scores.items()
    }


def draw_hard_negatives(arrays: Arrays) -> Iterator[Chart]:
    """Draw mean and deviation of the gaps over texts, from the hardest video on."""
    (axis,) = new_panels(1)
    facts = []
    for name, label, color in (
        ("plain", "without increments", COLORS[1]),
        ("corrected", "with increments", COLORS[0]),
    ):
        mean, deviation = arrays[name].mean(0), arrays[name].std(0)
        places = np.arange(1, len(mean) + 1)
        axis.fill_between(places, mean - deviation, mean + deviation, color=color, alpha=0.25, linewidth=0)
        axis.plot(places, mean, marker="o", markersize=3, color=color, label=label)
        facts.append(f"mean gap to the hardest video {label}: {mean[0]:.3g}")
    axis.axhline(0, color=COLORS[4], linewidth=0.6)
    axis.set(xlabel="other video, from the hardest", ylabel="cosine of own minus other")
    axis.legend()
    alt = "Lines of the mean gap in cosine to the hardest other videos, without increments and with them."
    note = (
        "GARE, Fig. 6. Both lines are from the same weights; the paper compares with a separately trained baseline: "
        "see the pages of the tables."
    )
    yield Chart("", drawings([axis], alt), facts, note)
