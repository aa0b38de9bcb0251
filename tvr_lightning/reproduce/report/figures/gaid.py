"""Figure of GAID: the weights of the gate over frames, beside the waveform (Fig. 5)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tvr_lightning.media.audio import read_audio
from tvr_lightning.media.video import read_clip
from tvr_lightning.methods import GAID
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.reproduce.report.figures.drawing import (
    COLOURS,
    NEGATIVE,
    Arrays,
    Chart,
    Scalar,
    new_figure,
    picture_of,
    to_chart,
)
from tvr_lightning.reproduce.report.figures.encoded_split import STRIP_SIZE, EncodedSplit
from tvr_lightning.reproduce.report.figures.kind import FigureKind
from tvr_lightning.reproduce.report.render import render

COLUMNS = 240
"""Columns of a drawn waveform."""


def gated(module: RetrievalModule) -> GAID | None:
    """Return the GAID with a gate that a method is; None where it is none."""
    return module if isinstance(module, GAID) and module.head.gate is not None else None


@torch.no_grad()
def measure_gate(encoded: EncodedSplit) -> Arrays:
    """Return the gate of matching pairs, and the sound of the two that listen most and least.

    Returns:
        `edges`, `histogram` of the weights of all frames that have sound; scalars `mean` and, over frames without
        sound, `silent_mean` (NaN where there are none); for the two pairs `captions`, `weights` (2, F), `times`
        (2, F) seconds, `durations` (2,), `low`, `high` (2, COLUMNS) of the waveform, `strips` (2, F, S, S, 3).
    """
    method = gated(encoded.module)
    assert method is not None
    assert method.head.gate is not None
    text, video = encoded.paired()
    logits = method.head.gate.of_video(video) + method.head.gate.of_text(text.sentence).unsqueeze(1)
    frames = video.frames.shape[1]
    weights = logits.sigmoid().mean(-1).expand(-1, frames)  # (B, F); a token gate by its mean over dimensions
    assert video.audio_mask is not None
    sounding = (video.audio_mask & video.frame_mask).cpu()
    silent = (~video.audio_mask & video.frame_mask).cpu()
    weights = weights.cpu()
    edges = np.linspace(0, 1, 41)
    arrays: Arrays = {
        "edges": edges,
        "histogram": np.histogram(weights[sounding].numpy(), edges)[0] / max(int(sounding.sum()), 1),
        "mean": np.array(float(weights[sounding].mean())),
        "silent_mean": np.array(float(weights[silent].mean())),
    }
    mean = (weights * sounding).sum(1) / sounding.sum(1).clamp(min=1)
    mean = mean.masked_fill(~sounding.any(1), torch.nan)
    audible = torch.nonzero(~mean.isnan()).flatten()
    if len(audible):
        order = audible[mean[audible].argsort(descending=True)]
        arrays |= _examples(encoded, [int(order[0]), int(order[-1])], weights.numpy())
    return arrays


def _examples(encoded: EncodedSplit, rows: list[int], weights: np.ndarray) -> Arrays:
    found: dict[str, list] = {
        name: [] for name in ("captions", "weights", "times", "durations", "low", "high", "strips")
    }
    for row in rows:
        text, video = encoded.pairs[row].tolist()
        record = encoded.split.videos[int(encoded.video_index[video])]
        clip = read_clip(
            record.path,
            frames=weights.shape[1],
            image_size=STRIP_SIZE,
            sampling=encoded.data.sampling,
            span=record.span,
        )
        track = read_audio(record.path, span=record.span)
        columns = np.array_split(track.waveform, COLUMNS)
        found["captions"].append(encoded.caption(text))
        found["weights"].append(weights[row])
        found["times"].append(clip.timestamps.numpy() - (record.span[0] if record.span else 0.0))
        found["durations"].append(len(track.waveform) / track.rate)
        found["low"].append([column.min(initial=0.0) for column in columns])
        found["high"].append([column.max(initial=0.0) for column in columns])
        found["strips"].append(clip.pixels.permute(0, 2, 3, 1).numpy())
    return {name: np.array(values) for name, values in found.items()}


def draw_gate(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw the histogram of the gate, and its weights over the waveforms of two videos."""
    figures, (axis,) = new_figure(1)
    axis.stairs(arrays["histogram"], arrays["edges"], fill=True, alpha=0.5, color=COLOURS[0])
    axis.set_xlabel("weight of the audio in a frame")
    axis.set_ylabel("share of the frames")
    alt = "A histogram, over the frames with audio, of the weight that the gate gives the audio."
    scalars = [Scalar("mean weight of the audio", "gate.mean")]
    if not np.isnan(arrays["silent_mean"]):
        scalars.append(Scalar("mean weight in frames without audio", "gate.silent_mean"))
    yield to_chart(figures, f"{key}-gate", alt, scalars, "Matching pairs of the test split.")
    for place, caption in enumerate(arrays.get("captions", [])):
        figures, (wave,) = new_figure(1)
        seconds = np.linspace(0, float(arrays["durations"][place]), arrays["low"].shape[1])
        figures[0].subplots_adjust(right=0.83)  # room for the second axis
        low, high = arrays["low"][place], arrays["high"][place]
        wave.fill_between(seconds, low, high, color=COLOURS[5], alpha=0.5, linewidth=0)
        wave.set_xlabel("seconds")
        wave.set_ylabel("waveform")
        gate = wave.twinx()
        gate.spines["top"].set_visible(False)
        gate.plot(arrays["times"][place], arrays["weights"][place], marker="o", color=NEGATIVE)
        gate.set_ylim(0, 1)
        gate.set_ylabel("weight of the audio")
        alt = "A waveform over time with the gate's weight of each frame as a line above it."
        drawn = to_chart(figures, f"{key}-gate{place}", alt)
        frames = picture_of(arrays["strips"][place], "The frames of its video")
        html = render("captioned.html", caption=caption, frames=frames, chart=drawn)
        title = "The video with the largest audio weight" if place == 0 else "The video with the smallest audio weight"
        yield Chart(alt, title, html=html, note="GAID, Fig. 5; the gate for the matching caption.")


FIGURES = (FigureKind("gate", "Weight of the audio per frame", measure_gate, draw_gate, gated),)
