"""Layout of DiDeMo: lists of files, a record per described moment of five-second segments, and tables of T-MASS."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

from tvr_lightning.synthetic.dataset_format import (
    PARTS,
    DatasetFormat,
    Item,
    Part,
    of_part,
    span_of,
    write_json,
    write_lines,
)
from tvr_lightning.synthetic.grammar import Caption, event_caption, paragraph
from tvr_lightning.synthetic.scene import Scene, Timing

_SEGMENT = 5.0  # seconds


def _describe(scene: Scene, part: Part, index: int, rng: random.Random) -> Item:
    sentences = paragraph(scene, rng)
    if rng.random() < 0.5:  # several annotators often describe the same moment
        sentences.append(event_caption(scene, rng.randint(1, len(scene.events)), rng))
    stem = (
        f"{rng.randrange(10**7, 10**8)}@N0{rng.randrange(10)}_{rng.randrange(10**9, 10**10)}_{rng.getrandbits(40):010x}"
    )
    listed = "" if index % 10 == 9 else rng.choice(("mp4", "mp4", "mov"))  # a few real names end in a bare "."
    return Item(scene, part, f"{stem}.{listed}", f"videos/{stem}.{listed or 'mp4'}", sentences)


def _annotate(items: list[Item], folder: Path) -> None:
    identity = 0
    for part in PARTS:
        chosen = of_part(items, part)
        write_lines(folder / f"{part}_list.txt", [item.video_id for item in chosen])
        records = []
        for number in range(max(len(item.captions) for item in chosen)):  # records of a video are not adjacent
            for item in chosen:
                if number < len(item.captions):
                    records.append(_record(item, item.captions[number], identity))
                    identity += 1
        write_json(folder / f"{part}_data.json", records)
        table = folder / "tmass" / f"didemo_{part}_label.csv"
        table.parent.mkdir(exist_ok=True)
        with table.open("w", encoding="utf-8", newline="") as file:
            rows = [(f"/{item.file}", " ".join(caption.text for caption in item.captions)) for item in chosen]
            csv.writer(file, lineterminator="\n").writerows([("video_path", "text"), *rows])


def _record(item: Item, caption: Caption, identity: int) -> dict[str, Any]:
    start, end = span_of(caption, item.scene)
    segments = [round(start / _SEGMENT), round(end / _SEGMENT) - 1]
    return {
        "num_segments": round(item.scene.duration / _SEGMENT),
        "description": caption.text,
        "dl_link": "",
        "times": [segments] * 4,
        "video": item.video_id,
        "annotation_id": identity,
    }


FORMAT = DatasetFormat(
    timing=Timing(events=(3, 3), least=1, most=2, step=_SEGMENT),
    fps=6,
    validation=True,
    describe=_describe,
    annotate=_annotate,
)
