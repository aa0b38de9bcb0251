"""Layout of VATEX: ten captions in each of two languages, the lists and captions of HGR, and the official files."""

from __future__ import annotations

import random
from pathlib import Path

from tvr_lightning.synthetic.chinese import chinese_caption
from tvr_lightning.synthetic.dataset_format import (
    PARTS,
    DatasetFormat,
    Item,
    Part,
    of_part,
    sentence,
    write_json,
    write_lines,
    youtube_id,
)
from tvr_lightning.synthetic.grammar import captions, query
from tvr_lightning.synthetic.scene import Scene, Timing

_CAPTIONS = 10  # per video and language, as in the real dataset


def _describe(scene: Scene, part: Part, index: int, rng: random.Random) -> Item:
    # every caption of a test video is a query
    sentences = captions(scene, _CAPTIONS, rng) if part == "train" else [query(scene, rng) for _ in range(_CAPTIONS)]
    rng.shuffle(sentences)
    start = rng.randrange(300)
    video_id = f"{youtube_id(rng)}_{start:06d}_{start + 10:06d}"
    chinese = [chinese_caption(scene, rng) for _ in range(_CAPTIONS)]
    return Item(scene, part, video_id, f"videos/{video_id}.mp4", [sentence(caption) for caption in sentences], chinese)


def _annotate(items: list[Item], folder: Path) -> None:
    for part in PARTS:
        write_lines(folder / f"{part}_list.txt", [item.video_id for item in of_part(items, part)])
    sentences = {
        item.video_id: {
            "enCap": [caption.text for caption in item.captions],
            "chCap": [caption.text for caption in item.chinese],
        }
        for item in items
    }
    write_json(folder / "vatex_data.json", sentences)
    # HGR halved the official validation set into its validation and test sets
    for name, chosen in (("training", of_part(items, "train")), ("validation", of_part(items, "val", "test"))):
        records = [{"videoID": item.video_id, **sentences[item.video_id]} for item in chosen]
        write_json(folder / f"vatex_{name}_v1.0.json", records, indent=1)


FORMAT = DatasetFormat(
    timing=Timing(events=(2, 2), least=6, most=10, step=0.5),
    fps=10,
    validation=True,
    describe=_describe,
    annotate=_annotate,
)
