"""Layout of LSMDC: tab-separated lines without a header, and a folder of clips per movie, which is in one split."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from tvr_lightning.synthetic.dataset_format import PARTS, DatasetFormat, Item, Part, of_part, sentence, write_lines
from tvr_lightning.synthetic.grammar import Caption, full_caption, query
from tvr_lightning.synthetic.scene import Scene, Timing

_CLIPS_PER_MOVIE = 20
_TITLES = ("The_Moving_Shapes", "Crosses_and_Rings", "A_Star_Is_Drawn", "Mr._Triangle", "Full_Circle")
_FIRST_MOVIE = {"train": 1, "val": 1001, "test": 3001}
_FILES = {
    "train": "LSMDC16_annos_training.csv",
    "val": "LSMDC16_annos_val.csv",
    "test": "LSMDC16_challenge_1000_publictect.csv",
}


def _describe(scene: Scene, part: Part, index: int, rng: random.Random) -> Item:
    number = index // _CLIPS_PER_MOVIE
    movie = f"{_FIRST_MOVIE[part] + number:04d}_{_TITLES[number % len(_TITLES)]}"
    start = 60.0 + 40 * (index % _CLIPS_PER_MOVIE) + rng.randrange(1000) / 1000
    video_id = f"{movie}_{_clock(start)}-{_clock(start + scene.duration)}"
    sentences = [_sentence(scene, part, rng)]
    if part == "train" and index % 15 == 3:  # a few clips of the real training file have two lines
        sentences.append(_sentence(scene, part, rng))
    return Item(scene, part, video_id, f"videos/{movie}/{video_id}.avi", sentences, query=0 if part == "test" else None)


def _sentence(scene: Scene, part: Part, rng: random.Random) -> Caption:
    # one caption per video: captions of twins need the audio in every split
    sentences = (
        full_caption(scene, rng, sound=1.0 if scene.twin is not None else 0.4) if part == "train" else query(scene, rng)
    )
    return sentence(replace(sentences, text=sentences.text.replace("\t", " ")))


def _annotate(items: list[Item], folder: Path) -> None:
    for part in PARTS:
        lines = []
        for item in of_part(items, part):
            start, _, end = item.video_id.rpartition("_")[2].partition("-")
            lines += ["\t".join((item.video_id, start, end, start, end, sentences.text)) for sentences in item.captions]
        write_lines(folder / _FILES[part], lines)


def _clock(seconds: float) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02d}.{whole // 60 % 60:02d}.{whole % 60:02d}.{thousandths:03d}"


FORMAT = DatasetFormat(
    timing=Timing(events=(2, 2), least=5, most=8, step=0.5),
    fps=10,
    validation=True,
    describe=_describe,
    annotate=_annotate,
)
