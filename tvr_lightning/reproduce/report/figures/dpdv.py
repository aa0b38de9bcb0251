"""Figures of DPDV: patch merging in the Spot-Path (Figs. S2 and S3)."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tvr_lightning.methods.dpdv.patch_merging import dpc_knn
from tvr_lightning.reproduce.report.drawing import Arrays, Chart, frames
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit

SHOWN_VIDEOS = 2
CELL = 14  # pixels of a patch in the drawing of a stage


@torch.no_grad()
def measure_merging(encoded: EncodedSplit) -> dict[str, Any]:
    """Return the stages of patch merging in the frames of K test videos, and the frames of the Spot-Path.

    `members` (K, S, F, P) has the merged patch of each patch after each of S stages, `left` (S,) their number, and
    `spot` (K, F) the frames that the first of the `captions` (K,) of a video selects.
    """
    module = encoded.module
    merging = module.reduction
    batch = next(iter(encoded.data.evaluation_dataloaders("test")[1]))[:SHOWN_VIDEOS].to(module.device)
    patches = module.encoder.encode_video(batch.video, patches=True).patches
    videos, count, total = patches.shape[:3]
    schedule = merging.options.schedule(total)
    tokens = patches.float().flatten(0, 1)
    member = torch.arange(total, device=tokens.device).expand(len(tokens), -1)
    members = []
    for stage, clusters in zip(merging.stages, schedule, strict=True):
        seen = tokens if stage.scored is None else stage.scored(tokens)[0]
        member = dpc_knn(seen, clusters, stage.options.neighbors, stage.options.density).assignment.gather(1, member)
        members.append(member.unflatten(0, (videos, count)))
        tokens = stage(tokens, clusters)
    rows = [int(torch.nonzero(encoded.video_index == index)) for index in batch.index.cpu()]
    texts = [int(torch.nonzero(encoded.matching == row)[0]) for row in rows]
    return {
        "names": batch.video_id,
        "members": torch.stack(members, 1),
        "left": schedule,
        "strips": np.stack([encoded.strip(row, frames=count, size=math.isqrt(total) * CELL) for row in rows]),
        "captions": [encoded.caption(text) for text in texts],
        "spot": module.head.partition(encoded.texts[texts], encoded.videos[rows])[0],
    }


def draw_merging(arrays: Arrays) -> Iterator[Chart]:
    """Draw every frame after each stage, and cross out the frames that are not in the Spot-Path."""
    videos = (arrays[name] for name in ("names", "captions", "strips", "spot", "members"))
    for name, caption, strip, spot, stages in zip(*videos, strict=True):
        images = [frames(_crossed_out(strip, ~spot), f"Frames of {name}", f"The Spot-Path of “{caption}”")]
        for stage, (members, left) in enumerate(zip(stages, arrays["left"], strict=True), start=1):
            alt = f"The same frames after stage {stage}"
            words = f"After stage {stage}: {left} patches per frame."
            images.append(frames(_crossed_out(_merged(strip, members), ~spot), alt, words))
        note = (
            "DPDV, Figs. S2 and S3; a merged patch has the mean color of its pixels. Crossed-out frames are those that "
            "the caption leaves to the Recover-Path."
        )
        yield Chart(f"Stages of patch merging: {name}", images, note=note)


def _crossed_out(strip: np.ndarray, left_out: np.ndarray) -> np.ndarray:
    """Return the frames (F, S, S, 3) with a red cross over some."""
    size = strip.shape[1]
    near = np.abs(np.subtract.outer(np.arange(size), np.arange(size))) < 2
    crossed = strip.copy()
    crossed[np.ix_(left_out)] = np.where((near | near[::-1])[..., None], (200, 30, 30), strip[left_out])
    return crossed


def _merged(strip: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return the frames (F, S, S, 3) with each merged patch in its mean color and dark lines between them."""
    grid = math.isqrt(members.shape[1])
    painted = np.empty_like(strip)
    for frame, member in enumerate(members):
        area = member.reshape(grid, grid).repeat(CELL, 0).repeat(CELL, 1)
        for patch in np.unique(member):
            painted[frame][area == patch] = strip[frame][area == patch].mean(0)
        painted[frame][1:][area[1:] != area[:-1]] = 0
        painted[frame][:, 1:][area[:, 1:] != area[:, :-1]] = 0
    return painted
