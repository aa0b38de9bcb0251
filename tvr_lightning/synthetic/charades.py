"""Layout of Charades: a CSV file with one script per video, and sentences about spans as in Charades-STA."""

from __future__ import annotations

import csv
import random
import string
from dataclasses import replace
from pathlib import Path

from tvr_lightning.synthetic.dataset_format import DatasetFormat, Item, Part, of_part, sentence, span_of, write_lines
from tvr_lightning.synthetic.grammar import describe, event_caption, full_caption
from tvr_lightning.synthetic.scene import MOTIONS, Scene, Timing

_FIELDS = (
    "id", "subject", "scene", "quality", "relevance", "verified", "script",
    "objects", "descriptions", "actions", "length",
)  # fmt: skip


def _describe(scene: Scene, part: Part, index: int, rng: random.Random) -> Item:
    video_id = "".join(rng.choices(string.ascii_uppercase + string.digits, k=5))
    script = sentence(full_caption(scene, rng, sound=1.0 if scene.twin is not None else 0.4))
    spans = [event_caption(scene, number, rng) for number in range(1, len(scene.events) + 1)]
    if rng.random() < 0.5:  # some spans have a second sentence
        spans.append(event_caption(scene, rng.randint(1, len(scene.events)), rng))
    spans = [replace(caption, text=f"{caption.text}.") for caption in spans]
    return Item(scene, part, video_id, f"videos/{video_id}.mp4", [script, *spans], query=0 if part == "test" else None)


def _annotate(items: list[Item], folder: Path) -> None:
    parts: tuple[Part, ...] = ("train", "test")
    for part in parts:
        chosen = of_part(items, part)
        with (folder / f"Charades_v1_{part}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, _FIELDS, lineterminator="\r\n")  # as in the real files
            writer.writeheader()
            writer.writerows(_row(item) for item in chosen)
        lines = []
        for item in chosen:
            for caption in item.captions[1:]:
                start, end = span_of(caption, item.scene)
                lines.append(f"{item.video_id} {start:.1f} {end:.1f}##{caption.text}")
        write_lines(folder / f"charades_sta_{part}.txt", lines)


def _row(item: Item) -> dict[str, str]:
    scene = item.scene
    return {
        "id": item.video_id,
        "subject": "SYNTH",
        "scene": "Other",
        "quality": "7",
        "relevance": "7",
        "verified": "Yes",
        "script": item.captions[0].text,
        "objects": ";".join(sorted({event.figure.shape for event in scene.events})),
        "descriptions": describe(scene),
        "actions": ";".join(f"c{MOTIONS.index(e.motion):03d} {e.start:.2f} {e.end:.2f}" for e in scene.events),
        "length": f"{scene.duration:.2f}",
    }


FORMAT = DatasetFormat(
    timing=Timing(events=(2, 3), least=5, most=8, step=1.0),
    fps=6,
    validation=False,
    describe=_describe,
    annotate=_annotate,
)
