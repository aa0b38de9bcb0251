"""Image of the model input for one clip: its sampled frames with its waveform and log-mel spectrogram."""

from pathlib import Path

import numpy as np
import torch

from tvr_lightning.data.audio_alignment import frame_cells, log_mel
from tvr_lightning.files import replace_whole
from tvr_lightning.media.audio import SAMPLE_RATE, STEPS_PER_SECOND, read_audio
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import read_clip
from tvr_lightning.option_types import FrameSampling

PER_ROW = 6
COLORS = ("#4477aa", "#ccbb44")


def preview(video: Path, out: Path, *, frames: int, sampling: FrameSampling = "one-fps-uniform") -> None:
    """Draw the frames of a video with their times, its waveform and its log-mel spectrogram into one image.

    Bands of two colors mark the audio of each frame; hatching marks intervals that were not decoded. The suffix of
    `out` determines the format (.png, .pdf, .svg).
    """
    # Figure without pyplot: no global state, no display, thread-safe.
    from matplotlib.figure import Figure

    clip = read_clip(video, frames, Preparation(224), sampling)
    track = read_audio(video, span=(0.0, clip.duration))
    times = clip.timestamps
    cells = frame_cells(times, clip.frame_mask, clip.duration)
    rows = -(-len(clip.pixels) // PER_ROW)
    figure = Figure(figsize=(12, 2.1 * rows + 5.2), layout="constrained")
    upper, lower = np.asarray(figure.subfigures(2, 1, height_ratios=[2.1 * rows, 5.2]))
    length = len(track.waveform) / SAMPLE_RATE
    count = int(clip.frame_mask.sum())
    figure.suptitle(f"{video.name}: {length:.2f} s, {count} frames, {sampling}", parse_math=False)
    for index, axes in enumerate(np.ravel(upper.subplots(rows, PER_ROW))):
        axes.axis("off")
        if index < len(clip.pixels) and clip.frame_mask[index]:
            axes.imshow(clip.pixels[index].permute(1, 2, 0).numpy())
            axes.set_title(f"{times[index]:.2f} s", color=COLORS[index % 2], fontsize=10)
    waveform, spectrogram = lower.subplots(2, 1, sharex=True)
    # Minimum and maximum per pixel column: a line through every sample would hide short peaks.
    columns = max(1, min(2000, len(track.waveform)))
    parts = np.array_split(track.waveform, columns) if len(track.waveform) else [np.zeros(1, np.float32)]
    moments = (np.arange(len(parts)) + 0.5) * len(track.waveform) / SAMPLE_RATE / len(parts)
    waveform.fill_between(moments, [p.min() for p in parts], [p.max() for p in parts], color="black", linewidth=0.5)
    limit = max(0.01, 1.05 * float(np.abs(track.waveform).max(initial=0.0)))
    waveform.set(ylim=(-limit, limit), ylabel="waveform")
    for index, (first, last) in enumerate(cells.tolist()):
        if last > first:
            waveform.axvspan(first, last, color=COLORS[index % 2], alpha=0.25, linewidth=0)
            waveform.axvline(float(times[index]), color=COLORS[index % 2], linewidth=1)
    edges = np.flatnonzero(np.diff(~track.heard, prepend=False, append=False)) / STEPS_PER_SECOND
    for first, last in edges.reshape(-1, 2).tolist():  # intervals in which no audio was decoded
        waveform.axvspan(first, last, facecolor="white", edgecolor="grey", alpha=0.8, linewidth=0, hatch="//")
    if not track.present:
        problem = track.problem or "no audio track"
        waveform.text(0.5, 0.5, problem, ha="center", va="center", transform=waveform.transAxes, parse_math=False)
    elif track.problem:
        waveform.set_title(f"damaged: {track.problem}", fontsize=9, color="firebrick", parse_math=False)
    mel = log_mel(torch.from_numpy(track.waveform))
    spectrogram.imshow(mel.numpy(), origin="lower", aspect="auto", extent=(0, max(length, 0.01), 0, len(mel)))
    spectrogram.set(xlabel="seconds", ylabel="log-mel band", xlim=(0, max(length, 0.01)))

    out.parent.mkdir(parents=True, exist_ok=True)
    with replace_whole(out) as file:
        figure.savefig(file, dpi=110, format=out.suffix[1:].lower())
