"""What a layout is: the community's folders and annotation files of one dataset, made from scenes."""

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

DatasetName = Literal["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"]
Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass
class Item:
    """One video of a dataset.

    Attributes:
        scene: what it shows.
        part: the split that it belongs to.
        video_id: its name in the annotation files.
        file: its path below the dataset's folder, with forward slashes.
        captions: what the annotations say about it, in their order.
        chinese: the same in Chinese, where the dataset has it.
        query: position in `captions` of the sentence that retrieval tests with, where there is one.
    """

    scene: Scene
    part: Part
    video_id: str
    file: str
    captions: list[Caption]
    chinese: list[Caption] = field(default_factory=list)
    query: int | None = None


@dataclass(frozen=True)
class Layout:
    """How one dataset stores its videos and annotations.

    Attributes:
        timing: number and length of a video's events.
        fps: frames per second of its videos.
        validation: whether it has a validation split of its own.
        describe: names a video and captions it, given its scene, part, position, and random stream.
        annotate: writes the annotation files of all items into a folder.
    """

    timing: Timing
    fps: int
    validation: bool
    describe: Callable[[Scene, Part, int, random.Random], Item]
    annotate: Callable[[list[Item], Path], None]


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write UTF-8 JSON."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")


def write_lines(path: Path, lines: list[str]) -> None:
    """Write UTF-8 lines with Unix line ends."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def of_part(items: list[Item], *parts: Part) -> list[Item]:
    """Keep the items of some parts, in order."""
    return [item for item in items if item.part in parts]


def youtube_id(rng: random.Random) -> str:
    """Draw eleven characters as YouTube names its videos; some begin with a dash or hold underscores."""
    return "".join(rng.choices(string.ascii_letters + string.digits + "-_", k=11))


def sentence(caption: Caption) -> Caption:
    """Return a caption with a capital letter and a full stop."""
    return replace(caption, text=f"{caption.text[0].upper()}{caption.text[1:]}.")


def span_of(caption: Caption, scene: Scene) -> tuple[float, float]:
    """Seconds that a caption is about: its event's, or all."""
    if not caption.kind.startswith("event"):
        return 0.0, scene.duration
    event = scene.events[int(caption.kind.removeprefix("event")) - 1]
    return event.start, event.end
