"""What enters the encoder equals what the released loaders give it: frames of real clips under each released rule."""

import json
from pathlib import Path

import av
import numpy as np
import pytest

from tvr_lightning.media.video import read_clip

RULES = {
    "clip4clip": ("int-fps-uniform", None),
    "gare_drl": ("round-fps-uniform", None),
    "xpool_tmass_gaid": ("container-segments", None),
    "tmass_didemo_0_31": ("container-segments", (0.0, 31.0)),
}
"""Sampling and span of each rule."""


def clips_of(case, folder):
    """Return the recorded clips by file, those that are in the folder; skip if none is."""
    recorded = json.loads(case.read_text())["clips"]
    found = {folder / name: clip for name, clip in recorded.items() if (folder / name).is_file()}
    if not found:
        pytest.skip(f"{folder} contains none of the {len(recorded)} clips of {case.name}")
    return found


def times_at(path: Path, places: list[int]) -> list[float]:
    """Seconds from the first frame of the frames at these places of a file read from its start."""
    with av.open(str(path)) as container:
        times = sorted(frame.time for frame in container.decode(video=0))
    return [times[place] - times[0] for place in places]


def report(case, compared, wrong, notes=()):
    """Print what was compared, and fail in one line if something differs."""
    print(f"\n{case}: {len(wrong)} of {compared} differ", *notes, *wrong, sep="\n  ")
    if wrong or not compared:
        pytest.fail(f"{case}: {len(wrong)} of {compared} differ: {', '.join(wrong[:3])}", pytrace=False)


def test_frames(frames_case, test_data):
    compared, largest, wrong, notes = 0, 0.0, [], []
    for path, clip in clips_of(frames_case, test_data).items():
        for rule, expected in clip["rules"].items():
            asked, taken, times = expected["asked"], expected["taken"], expected.get("times")
            if taken is None or (asked != taken and max(asked) >= clip["frames"]):
                # Beyond the last frame, OpenCV gives a frame that depends on how it seeks.
                notes.append(f"{path.name}, {rule}: left out, since the loader asks for a frame after the last one")
                continue
            if asked != taken:
                notes.append(f"{path.name}, {rule}: compared with the frames that the loader asks for")
                times = times_at(path, asked)
            sampling, span = RULES[rule]
            found = read_clip(path, frames=12, image_size=16, sampling=sampling, span=span)
            ours = found.timestamps[found.frame_mask].tolist()
            compared += 1
            # The segment rules repeat the last frame of a clip that has too few.
            padded = [*times, *times[-1:] * (len(ours) - len(times))] if sampling == "container-segments" else times
            distance = np.inf if len(ours) != len(padded) else np.abs(np.subtract(ours, padded)).max()
            if distance > 0.001:
                wrong.append(f"{path.name}, {rule}: {len(times)} frames at {times}, ours {np.round(ours, 3).tolist()}")
            else:
                largest = max(largest, distance)
    report(frames_case, compared, wrong, [f"largest difference {largest:.1e} s", *notes])
