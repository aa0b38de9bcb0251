"""Figure of GAID: the weights of the gate over frames, next to the waveform (Fig. 5)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tvr_lightning.media.audio import SAMPLE_RATE, read_audio
from tvr_lightning.reproduce.report.drawing import COLORS, Arrays, Chart, drawings, frames, new_panels
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit

COLUMNS = 240  # of a drawn waveform


@torch.no_grad()
def measure_gate(encoded: EncodedSplit) -> dict[str, Any]:
    """Return the gate of matching pairs, and the audio of the two pairs with the largest and the smallest weight.

    The histogram and `mean` are of the F frames that have audio, `silent_mean` is of the others, NaN if there are none.
    """
    gate = encoded.module.head.gate
    text, video = encoded.paired()
    assert video.audio_mask is not None
    weights = (gate.of_video(video) + gate.of_text(text.sentence).unsqueeze(1)).sigmoid().mean(-1)  # over dimensions
    weights = weights.expand(-1, video.frames.shape[1]).cpu()  # (B, F)
    audible = (video.audio_mask & video.frame_mask).cpu()
    silent = (~video.audio_mask & video.frame_mask).cpu()
    histogram, edges = np.histogram(weights[audible].numpy(), np.linspace(0, 1, 41))
    arrays: dict[str, Any] = {"edges": edges, "histogram": histogram / max(int(audible.sum()), 1)}
    arrays |= {"mean": weights[audible].mean(), "silent_mean": weights[silent].mean()}
    mean = (weights * audible).sum(1) / audible.sum(1)  # NaN without audio
    rows = [row for row in mean.argsort(descending=True).tolist() if not mean[row].isnan()]
    examples = []
    for row in (rows[0], rows[-1]) if rows else ():
        text, video = encoded.pairs[row].tolist()
        record = encoded.record(video)
        clip = encoded.clip(record, weights.shape[1])
        track = read_audio(record.path, span=record.span)
        columns = np.array_split(track.waveform, COLUMNS)
        started = record.span[0] if record.span else 0.0
        examples.append({
            "captions": encoded.caption(text), "weights": weights[row].numpy(),
            "times": clip.timestamps.numpy() - started, "durations": len(track.waveform) / SAMPLE_RATE,
            "low": [column.min(initial=0.0) for column in columns],
            "high": [column.max(initial=0.0) for column in columns],
            "strips": clip.pixels.permute(0, 2, 3, 1).numpy(),
        })  # fmt: skip
    return arrays | {name: [example[name] for example in examples] for name in (examples or [{}])[0]}


def draw_gate(arrays: Arrays) -> Iterator[Chart]:
    """Draw the histogram of the gate, and its weights over the waveforms of two videos."""
    (axis,) = new_panels(1)
    axis.stairs(arrays["histogram"], arrays["edges"], fill=True, alpha=0.5, color=COLORS[0])
    axis.set(xlabel="weight of the audio in a frame", ylabel="share of the frames")
    facts = [f"mean weight of the audio: {arrays['mean']:.3g}"]
    if not np.isnan(arrays["silent_mean"]):
        facts.append(f"mean weight in frames without audio: {arrays['silent_mean']:.3g}")
    alt = "A histogram, over the frames with audio, of the weight that the gate gives the audio."
    yield Chart("", drawings([axis], alt), facts, "Matching pairs of the test split.")
    for place, caption in enumerate(arrays.get("captions", [])):
        (wave,) = new_panels(1, layout="constrained")
        seconds = np.linspace(0, float(arrays["durations"][place]), arrays["low"].shape[1])
        wave.fill_between(seconds, arrays["low"][place], arrays["high"][place], color=COLORS[5], alpha=0.5, lw=0)
        wave.set(xlabel="seconds", ylabel="waveform")
        gate = wave.twinx()
        gate.plot(arrays["times"][place], arrays["weights"][place], marker="o", color=COLORS[1])
        gate.set(ylim=(0, 1), ylabel="weight of the audio")
        drawn = drawings([wave], "A waveform over time with the gate's weight of each frame as a line above it.")
        images = [frames(arrays["strips"][place], "The frames of its video"), *drawn]
        title = f"The video with the {'smallest' if place else 'largest'} audio weight: “{caption}”"
        yield Chart(title, images, note="GAID, Fig. 5; the gate for the matching caption.")
