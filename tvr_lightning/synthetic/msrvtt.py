"""Layout of MSR-VTT, with the annotation files of CLIP4Clip."""

from __future__ import annotations

import csv
import random
from pathlib import Path

from tvr_lightning.synthetic.dataset_format import DatasetFormat, Item, Part, of_part, write_json, write_lines
from tvr_lightning.synthetic.grammar import captions, query
from tvr_lightning.synthetic.scene import BACKDROP_COLOURS, Scene, Timing

_CAPTIONS = 20  # per video, as in the real dataset
_FULL_TEST_SHARE = 3 / 10  # 2,990 of 10,000 videos


def _describe(scene: Scene, part: Part, index: int, rng: random.Random) -> Item:
    sentences = captions(scene, _CAPTIONS, rng)
    rng.shuffle(sentences)
    asked = None
    if part == "test":  # the test sentence is one of the twenty captions
        asked = rng.randrange(_CAPTIONS)
        sentences[asked] = query(scene, rng)
    return Item(scene, part, f"video{index}", f"videos/video{index}.mp4", sentences, query=asked)


def _annotate(items: list[Item], folder: Path) -> None:
    split = _full_split(items)
    sentences = [(item.video_id, caption.text) for item in items for caption in item.captions]
    random.Random(len(sentences)).shuffle(sentences)  # the real file does not keep a video's sentences together
    write_json(
        folder / "MSRVTT_data.json",
        {
            "info": {"description": "Synthetic videos in the format of MSR-VTT.", "version": "1.0", "year": "2016"},
            "videos": [
                {
                    "category": BACKDROP_COLOURS.index(item.scene.backdrop.colour),
                    "url": "",
                    "video_id": item.video_id,
                    "start time": 0.0,
                    "end time": item.scene.duration,
                    "split": split[item.video_id],
                    "id": index,
                }
                for index, item in enumerate(items)
            ],
            "sentences": [
                {"caption": text, "video_id": video_id, "sen_id": index}
                for index, (video_id, text) in enumerate(sentences)
            ],
        },
    )
    test = of_part(items, "test")
    rest = of_part(items, "train", "val")
    names = {
        name: [video_id for video_id in split if split[video_id] == name] for name in ("train", "validate", "test")
    }
    for name, ids in (
        ("MSRVTT_train.9k.csv", [item.video_id for item in rest]),
        ("MSRVTT_train.7k.csv", names["train"] + names["validate"]),
        ("MSRVTT_train.full.csv", names["train"]),
        ("MSRVTT_val.full.csv", names["validate"]),
        ("MSRVTT_test.full.csv", names["test"]),
    ):
        write_lines(folder / name, ["video_id", *ids])
    with (folder / "MSRVTT_JSFUSION_test.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("key", "vid_key", "video_id", "sentence"))
        for index, item in enumerate(test):
            assert item.query is not None, item.video_id
            text = item.captions[item.query].text
            writer.writerow((f"ret{index}", f"msr{item.video_id.removeprefix('video')}", item.video_id, text))


def _full_split(items: list[Item]) -> dict[str, str]:
    """Return the official split (6,513 / 497 / 2,990) by video; its test videos include those of 1k-A."""
    test = len(of_part(items, "test"))
    beside = max(0, round(len(items) * _FULL_TEST_SHARE) - test)
    train = len(of_part(items, "train")) - beside
    validate = len(of_part(items, "val"))
    names = ["train"] * train + ["validate"] * validate + ["test"] * (beside + test)
    ordered = of_part(items, "train")[:train] + of_part(items, "val") + of_part(items, "train")[train:]
    ordered += of_part(items, "test")
    return {item.video_id: name for item, name in zip(ordered, names, strict=True)}


FORMAT = DatasetFormat(
    timing=Timing(events=(2, 2), least=6, most=10, step=0.5),
    fps=10,
    validation=True,
    describe=_describe,
    annotate=_annotate,
)
