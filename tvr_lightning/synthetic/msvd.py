"""Layout of MSVD: AVI files, lists of names, and a pickle with at least twelve tokenized captions per video."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

from tvr_lightning.synthetic.dataset_format import PARTS, DatasetFormat, Item, Part, of_part, write_lines, youtube_id
from tvr_lightning.synthetic.grammar import captions, query
from tvr_lightning.synthetic.scene import Scene, Timing


def _describe(scene: Scene, part: Part, index: int, rng: random.Random) -> Item:
    count = rng.randint(12, 20)
    # every caption of a test video is a query
    sentences = captions(scene, count, rng) if part == "train" else [query(scene, rng) for _ in range(count)]
    rng.shuffle(sentences)
    start = rng.randrange(300)
    video_id = f"{youtube_id(rng)}_{start}_{start + round(scene.duration)}"
    return Item(scene, part, video_id, f"videos/{video_id}.avi", sentences)


def _annotate(items: list[Item], folder: Path) -> None:
    for part in PARTS:
        write_lines(folder / f"{part}_list.txt", [item.video_id for item in of_part(items, part)])
    tokens = {item.video_id: [caption.text.split() for caption in item.captions] for item in items}
    (folder / "raw-captions.pkl").write_bytes(pickle.dumps(tokens, protocol=4))


FORMAT = DatasetFormat(
    timing=Timing(events=(2, 2), least=5, most=8, step=0.5),
    fps=10,
    validation=True,
    describe=_describe,
    annotate=_annotate,
)
