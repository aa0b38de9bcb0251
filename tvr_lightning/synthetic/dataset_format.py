"""Formats of datasets: the folders and annotation files of a real dataset, written from scenes."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tvr_lightning.synthetic.grammar import Caption
from tvr_lightning.synthetic.scene import Scene, Timing

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass
class Item:
    """One video of a dataset.

    Attributes:
        scene: Scene of the video.
        part: Split of the video.
        video_id: Identifier in the annotation files.
        file: Path relative to the folder of the dataset, with forward slashes.
        captions: Captions in the order of the annotations.
        chinese: Captions in Chinese, if the dataset has them.
        query: Position in `captions` of the test query, if there is only one.
    """

    scene: Scene
    part: Part
    video_id: str
    file: str
    captions: list[Caption]
    chinese: list[Caption] = field(default_factory=list)
    query: int | None = None


@dataclass(frozen=True)
class DatasetFormat:
    """Format of the videos and annotations of a dataset.

    Attributes:
        timing: Number and length of the events of a video.
        fps: Frame rate of the videos in frames per second.
        validation: Whether the dataset has a separate validation split.
        describe: Function that returns a video with ID and captions from its scene, part, position, and random stream.
        annotate: Function that writes the annotation files of all items into a folder.
    """

    timing: Timing
    fps: int
    validation: bool
    describe: Callable[[Scene, Part, int, random.Random], Item]
    annotate: Callable[[list[Item], Path], None]


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write a UTF-8 JSON file."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")


def write_lines(path: Path, lines: list[str]) -> None:
    """Write lines to a UTF-8 file with Unix line endings."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def of_part(items: list[Item], *parts: Part) -> list[Item]:
    """Return the items of the given parts, in order."""
    return [item for item in items if item.part in parts]


def youtube_id(rng: random.Random) -> str:
    """Return a random ID of eleven characters like those of YouTube; some begin with a dash or contain underscores."""
    return "".join(rng.choices(string.ascii_letters + string.digits + "-_", k=11))


def sentence(caption: Caption) -> Caption:
    """Return a caption with a capital letter and a full stop."""
    return replace(caption, text=f"{caption.text[0].upper()}{caption.text[1:]}.")


def span_of(caption: Caption, scene: Scene) -> tuple[float, float]:
    """Return start and end in seconds of the event that a caption describes, or of the whole scene."""
    if not caption.kind.startswith("event"):
        return 0.0, scene.duration
    event = scene.events[int(caption.kind.removeprefix("event")) - 1]
    return event.start, event.end
