"""Figures of DPDV: patches merging stage by stage (Fig. S2), and frames that match no word of a caption (Fig. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods import DPDV
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.dpdv.clustering import dpc_knn
from tvr_lightning.methods.dpdv.patch_merging import PatchFeatureMerging, PatchMergingStage
from tvr_lightning.reproduce.report.figures.drawing import (
    COLOURS,
    Arrays,
    Chart,
    NotDrawnError,
    Scalar,
    new_figure,
    picture_of,
    to_chart,
)
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit
from tvr_lightning.reproduce.report.figures.kind import FigureKind
from tvr_lightning.reproduce.report.render import render

SHOWN_VIDEOS = 2
CELL = 14
"""Pixels of a patch in the drawing of a stage."""


def merging_of(module: RetrievalModule) -> PatchFeatureMerging | None:
    """Return the patch merging of a DPDV; None where there is none."""
    merging = module.reduction if isinstance(module, DPDV) else None
    return merging if isinstance(merging, PatchFeatureMerging) else None


@torch.no_grad()
def stage_members(merging: PatchFeatureMerging, patches: Tensor) -> list[Tensor]:
    """Return which merged patch every patch has gone into after each stage.

    Args:
        merging: of DPDV.
        patches: (B, P, D) of B frames.

    Returns:
        For each stage (B, P) int64.
    """
    tokens, member, found = patches, torch.arange(patches.shape[1]).expand(len(patches), -1), []
    member = member.to(patches.device)
    for stage, clusters in zip(merging.stages, merging.options.schedule(patches.shape[1]), strict=True):
        assert isinstance(stage, PatchMergingStage)  # a ModuleList does not tell
        seen = tokens if stage.scored is None else stage.scored(tokens)[0]
        assignment = dpc_knn(seen, clusters, stage.options.neighbours, stage.options.density).assignment
        member = assignment.gather(1, member)
        found.append(member)
        tokens = stage(tokens, clusters)
    return found


@torch.no_grad()
def measure_merging(encoded: EncodedSplit) -> Arrays:
    """Return the stages of patch merging in the frames of some test videos.

    Returns:
        `names` (K,) of the videos, `members` (K, S, F, P) int64, the merged patch of each patch after each of S stages,
        `left` (S,), patches per frame after each, `strips` (K, F, G CELL, G CELL, 3) uint8 where P is a square G x G,
        else (K, 0).
    """
    module = encoded.module
    merging = merging_of(module)
    assert merging is not None
    batch = next(iter(encoded.data.evaluation_dataloaders("test")[1]))[:SHOWN_VIDEOS].to(module.device)
    patches = module.encoder.encode_video(batch.video, patches=True).patches
    assert patches is not None
    videos, frames, count = patches.shape[:3]
    stages = stage_members(merging, patches.float().flatten(0, 1))
    members = torch.stack([stage.unflatten(0, (videos, frames)) for stage in stages], dim=1)
    grid = math.isqrt(count)
    strips = np.zeros((videos, 0), dtype=np.uint8)
    if grid * grid == count:
        rows = [int(torch.nonzero(encoded.video_index == index)) for index in batch.index.cpu()]
        strips = np.stack([encoded.strip(row, frames=frames, size=grid * CELL) for row in rows])
    return {
        "names": np.array(batch.video_id),
        "members": members.cpu().numpy(),
        "left": np.array(merging.options.schedule(count)),
        "strips": strips,
    }


def draw_merging(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw, one row per stage, every frame with each merged patch in the mean colour of what went into it.

    Raises:
        NotDrawnError: the patches of a frame are no square grid.
    """
    if arrays["strips"].ndim < 3:
        raise NotDrawnError(f"{arrays['members'].shape[-1]} patches per frame do not form a square grid")
    videos = []
    for name, strip, stages in zip(arrays["names"], arrays["strips"], arrays["members"], strict=True):
        merged = [
            {"left": left, "frames": picture_of(_merged(strip, members), f"The same frames after stage {stage}")}
            for stage, (members, left) in enumerate(zip(stages, arrays["left"], strict=True), start=1)
        ]
        videos.append({"name": name, "frames": picture_of(strip, f"Frames of {name}"), "stages": merged})
    yield Chart(
        "Frames of videos, and the same frames with each merged patch in one color, stage by stage.",
        html=render("merging.html", key=key, videos=videos),
        note="DPDV, Fig. S2; a merged patch has the mean color of its pixels.",
    )


def _merged(strip: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return the frames (F, S, S, 3) with each merged patch in its mean colour and dark lines between them."""
    grid = math.isqrt(members.shape[1])
    painted = np.empty_like(strip)
    for frame, member in enumerate(members):
        area = member.reshape(grid, grid).repeat(CELL, 0).repeat(CELL, 1)
        for patch in np.unique(member):
            painted[frame][area == patch] = strip[frame][area == patch].mean(0)
        painted[frame][1:][area[1:] != area[:-1]] = 0
        painted[frame][:, 1:][area[:, 1:] != area[:, :-1]] = 0
    return painted


@torch.no_grad()
def measure_unmatched(encoded: EncodedSplit) -> Arrays:
    """Return how many frames match no word of their own caption better than words of others.

    A frame's match with a caption is its largest cosine with one of the words (SOT, EOT and padding left out). It is
    unmatched where that is below the mean of its matches with the other captions. The paper does not say how it counts.

    Args:
        encoded: test split of the run; methods whose features have no words are left out.

    Returns:
        `edges` (41,) and `histogram` (40,) of the frames' margin, own match minus mean of the others, and the
        scalar `share` of unmatched frames in percent.

    Raises:
        NotDrawnError: fewer than two captions have words.
    """
    text, video = encoded.paired()
    words, frames = unit(text.words), unit(video.frames)
    position = torch.arange(words.shape[1], device=words.device)
    length = text.word_mask.sum(1, keepdim=True)
    inner = text.word_mask & (position > 0) & (position < length - 1)
    kept = inner.any(1)
    margins = []
    for row in range(len(frames)):
        if not bool(kept[row]) or int(kept.sum()) < 2:
            continue
        products = torch.einsum("fd,nwd->fnw", frames[row][video.frame_mask[row]], words)
        best = products.masked_fill(~inner, -torch.inf).amax(-1)[:, kept]  # (F, captions)
        own = int(kept[:row].sum())
        others = (best.sum(1) - best[:, own]) / (best.shape[1] - 1)
        margins.append(best[:, own] - others)
    if not margins:
        raise NotDrawnError("no two matching captions have words other than SOT and EOT")
    margin = torch.cat(margins).double().cpu().numpy()
    edges = np.linspace(margin.min(), margin.max() + 1e-6, 41)
    return {
        "edges": edges,
        "histogram": np.histogram(margin, edges)[0] / len(margin),
        "share": np.array(100 * (margin < 0).mean()),
    }


def draw_unmatched(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw the histogram of the frames' margins."""
    figures, (axis,) = new_figure(1)
    axis.stairs(arrays["histogram"], arrays["edges"], fill=True, alpha=0.5, color=COLOURS[2])
    axis.axvline(0, color=COLOURS[1], linewidth=1)
    axis.set_xlabel("best cosine, own caption minus others'")
    axis.set_ylabel("share of the frames")
    yield to_chart(
        figures,
        f"{key}-unmatched",
        "A histogram over frames of how much better they match the words of their own caption than those of others.",
        [Scalar("frames that match no word of their caption better than words of others", "unmatched.share", " %")],
        "Similar to DPDV, Fig. 1, but with a different criterion: a frame's match is its largest cosine with a word. "
        "The published share is counted by sentence with CLIP4Clip on MSR-VTT-9k, so it is not comparable.",
    )


FIGURES = (
    FigureKind("merging", "Stages of patch merging", measure_merging, draw_merging, merging_of),
    FigureKind("unmatched", "Frames that match no word", measure_unmatched, draw_unmatched),
)
