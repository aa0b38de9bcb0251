"""Layout of ActivityNet Captions: a paragraph of timed sentences per video, with the first validation set for tests."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from tvr_lightning.synthetic.dataset_format import (
    DatasetFormat,
    Item,
    Part,
    of_part,
    sentence,
    span_of,
    write_json,
    youtube_id,
)
from tvr_lightning.synthetic.grammar import paragraph
from tvr_lightning.synthetic.scene import Scene, Timing


def _describe(scene: Scene, part: Part, index: int, rng: random.Random) -> Item:
    sentences = [sentence(caption) for caption in paragraph(scene, rng)]
    # as in the real files, all but the first sentence begin with a space, and a few contain newlines
    sentences[1:] = [replace(caption, text=f" {caption.text}") for caption in sentences[1:]]
    if index % 25 == 7:
        sentences[0] = replace(sentences[0], text=f"{sentences[0].text}\n")
    video_id = f"v_{youtube_id(rng)}"
    return Item(scene, part, video_id, f"videos/{video_id}.mp4", sentences)


def _annotate(items: list[Item], folder: Path) -> None:
    stranger = random.Random(len(items))
    files: tuple[tuple[Part, str, str], ...] = (("train", "train", "train_ids"), ("test", "val_1", "val_ids"))
    for part, name, ids in files:
        chosen = of_part(items, part)
        annotations = {
            item.video_id: {
                "duration": item.scene.duration,
                "timestamps": [list(span_of(caption, item.scene)) for caption in item.captions],
                "sentences": [caption.text for caption in item.captions],
            }
            for item in chosen
        }
        write_json(folder / f"{name}.json", annotations)
        # the real lists contain a few videos without annotations
        write_json(folder / f"{ids}.json", [*annotations, f"v_{youtube_id(stranger)}"])


FORMAT = DatasetFormat(
    timing=Timing(events=(3, 4), least=5, most=8, step=1.0),
    fps=5,
    validation=False,
    describe=_describe,
    annotate=_annotate,
)
