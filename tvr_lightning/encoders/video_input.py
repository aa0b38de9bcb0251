"""Sizes and times of frames as in the evaluation of Qwen3-VL-Embedding (qwen-vl-utils 0.0.14)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from tvr_lightning.option_types import Count, Options

FEWEST_TOKENS = 128
MOST_TOKENS = 768
"""Limits of the area of a frame, in squares of one token (`VIDEO_MIN_TOKEN_NUM`, `VIDEO_MAX_TOKEN_NUM`)."""
LIST_RATE = 2.0  # frames per second that qwen-vl-utils assumes for a list of frames


@dataclass
class VideoOptions(Options):
    """Preprocessing of a clip for a model that accepts videos.

    Attributes:
        resize: `published` resizes frames as qwen-vl-utils does; `processor` leaves this to the model's processor,
            whose one budget for the whole clip gives smaller frames.
        timestamps: `list` follows the evaluation on lists of frames: each frame is first resized separately, and frame
            i is at i / 2 seconds. `real` follows the evaluation on files, with the real times of the frames.
        total_pixels: maximum number of pixels of a clip with `published`, where a pair of frames counts as one frame.
    """

    resize: Literal["published", "processor"] = "processor"
    timestamps: Literal["list", "real"] = "real"
    total_pixels: Count = 7_864_320


def fitted_size(height: int, width: int, step: int, fewest: float, most: float) -> tuple[int, int]:
    """Return sides in multiples of `step` with about the same ratio, and an area from `fewest` to `most` pixels."""
    sides = tuple(max(step, round(side / step) * step) for side in (height, width))
    if math.prod(sides) > most:
        scale = math.sqrt(most / (height * width))
        return math.floor(height * scale / step) * step, math.floor(width * scale / step) * step
    if math.prod(sides) < fewest:
        scale = math.sqrt(fewest / (height * width))
        return math.ceil(height * scale / step) * step, math.ceil(width * scale / step) * step
    return sides[0], sides[1]


def published_sizes(
    height: int, width: int, frames: int, options: VideoOptions, patch: int = 32
) -> list[tuple[int, int]]:
    """Return the successive sizes of a frame: for a list first its own, in steps of two tokens, then the clip's."""
    sizes, area = [(height, width)], patch**2
    if options.timestamps == "list":
        # qwen-vl-utils passes the side of a token as that of a patch, half of it, so that steps are twice as long.
        sizes.append(fitted_size(height, width, 2 * patch, 4 * (2 * patch) ** 2, 16384 * (2 * patch) ** 2))
    most = max(min(MOST_TOKENS * area, options.total_pixels / frames * 2), int(1.05 * FEWEST_TOKENS * area))
    return [*sizes[1:], fitted_size(*sizes[-1], patch, FEWEST_TOKENS * area, most)]


def video_input(frames: Tensor, times: Tensor, options: VideoOptions, patch: int, together: int) -> dict[str, Any]:
    """Return sentence-transformers' input of one clip, with the metadata of its frames.

    Args:
        frames: Frames (K, 3, H, W) uint8.
        times: Times (K,) in seconds.
        options: Sizes and times.
        patch: Side of a token in pixels.
        together: Number of frames in a token; the last frame is repeated up to a multiple of it.
    """
    missing = -len(frames) % together
    if missing:
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    frames = frames.cpu()
    if options.resize == "published":
        *first, last = published_sizes(frames.shape[2], frames.shape[3], len(frames), options, patch)
        for height, width in first:
            images = [Image.fromarray(frame).resize((width, height)) for frame in frames.permute(0, 2, 3, 1).numpy()]
            frames = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
        frames = resize(frames, list(last), InterpolationMode.BICUBIC, antialias=True)
    seconds = times.tolist() + times[-1:].tolist() * missing
    span = seconds[-1] - seconds[0]
    rate = (len(seconds) - 1) / span if span > 0 else 1.0
    places = [second * rate for second in seconds]
    if options.timestamps == "list":
        rate, places = LIST_RATE, list(range(len(frames)))
    metadata = {
        "fps": rate, "total_num_frames": len(frames), "frames_indices": places, "duration": len(frames) / rate
    }  # fmt: skip
    return {"video": {"array": frames, "video_metadata": metadata}}
