"""Generation of a synthetic dataset in one of the seven original layouts."""

import dataclasses
import json
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any, get_args

from tvr_lightning.data.records import SYNTHETIC_FILE, SplitName
from tvr_lightning.data.recover_captions import Description, write_captions
from tvr_lightning.errors import UserError
from tvr_lightning.files import file_lock
from tvr_lightning.media.read_many import read_all
from tvr_lightning.option_types import DatasetName
from tvr_lightning.synthetic.formats import FORMATS, Item, span_of, write_json, write_lines, write_questions
from tvr_lightning.synthetic.grammar import describe_event, describe_scene, describe_segment
from tvr_lightning.synthetic.scene import Scene, draw_scenes
from tvr_lightning.synthetic.write import write_video

FORMAT_VERSION = 3  # version of scenes.json and of the generator; increases when equal arguments yield another dataset
LEAST_VIDEOS = 8
CAPTIONS_FILE = "captions.parquet"
SEGMENTS = 6  # number of descriptions per video, as in DPDV


def synthesize(
    dataset: DatasetName, root: Path, videos: int, seed: int, *, workers: int | None = None, progress: bool = True
) -> Path:
    """Write a learnable retrieval dataset of synthetic videos in the files and folders of a real one.

    A video shows one or two figures in successive events (motions) on a backdrop, with audio. One fifth of the videos,
    at least four, are test videos, and one twentieth, at least two, validation videos, if the dataset has that split.
    Test videos begin with pairs of figures that do not occur in this order in other videos. One video in five has a
    twin, which differs only in audio. Captions describe all events, or one, or only the audio.

    In addition to the real dataset's files, `SYNTHETIC.txt` marks every result as synthetic, `scenes.json` contains the
    scene of each video (`scene.Scene`) and the facts in each caption (`grammar.Caption`), and `captions.parquet`
    describes six equal segments of every video (see `data.recover_captions`).

    The dataset is written atomically to the folder `root/<dataset>`, which is returned, and depends only on `dataset`,
    `videos` (at least 8), and `seed`. If the same dataset exists, nothing is done; if the folder contains something
    else, UserError is raised. `workers` is the number of processes that render; None uses one per core.
    """
    if dataset not in FORMATS:
        raise UserError(f"no layout for dataset {dataset!r}; choose one of {', '.join(get_args(DatasetName))}")
    if videos < LEAST_VIDEOS:
        raise UserError(f"videos={videos} leaves no training videos; it must be at least {LEAST_VIDEOS}")
    folder = Path(root) / dataset
    if folder.exists() and any(folder.iterdir()):
        if _same(folder / "scenes.json", dataset, videos, seed):
            return folder
        raise UserError(
            f"{folder} already exists and is not this dataset ({videos} videos, seed {seed}). "
            "Remove it or choose another root."
        )
    dataset_format, items = FORMATS[dataset], _items(dataset, videos, seed)
    Path(root).mkdir(parents=True, exist_ok=True)
    unfinished = Path(root) / f".{dataset}-unfinished"
    lock = Path(root) / f"{unfinished.name}.lock"
    with file_lock(lock, f"the dataset {folder}"):
        shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process
        try:
            for parent in {(unfinished / item.file).parent for item in items}:
                parent.mkdir(parents=True, exist_ok=True)
            write = partial(write_item, folder=unfinished, fps=dataset_format.fps)
            read_all(items, write, workers=workers or os.cpu_count() or 1, title="writing videos", progress=progress)
            dataset_format.write(items, unfinished)
            write_captions(unfinished / CAPTIONS_FILE, _descriptions(items))
            truth = {item.video_id: _truth_of(item, items, dataset_format.fps) for item in items}
            scenes = {"dataset": dataset, "format": FORMAT_VERSION, "seed": seed, "videos": truth}
            write_json(unfinished / "scenes.json", scenes, indent=1)
            if dataset == "msrvtt":
                write_questions(items, seed, unfinished)
            text = "`tvr data synth` generated these videos and captions. Results on them are marked as synthetic."
            write_lines(unfinished / SYNTHETIC_FILE, [text])
            if folder.exists():
                folder.rmdir()
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            lock.unlink()
    return folder


def _same(scenes: Path, dataset: str, videos: int, seed: int) -> bool:
    if not scenes.is_file():
        return False
    there = json.loads(scenes.read_text(encoding="utf-8"))
    wanted = {"dataset": dataset, "format": FORMAT_VERSION, "seed": seed}
    return {key: there.get(key) for key in wanted} == wanted and len(there["videos"]) == videos


def _items(dataset: DatasetName, videos: int, seed: int) -> list[Item]:
    form, test = FORMATS[dataset], max(4, round(videos / 5))
    val = max(2, round(videos / 20)) if form.validation else 0
    counts: dict[SplitName, int] = {"train": videos - test - val, "val": val, "test": test}
    seen: set[tuple[object, ...]] = set()
    parts: list[tuple[SplitName, Scene]] = []
    for part, count in counts.items():
        name = f"{dataset}/{seed}/{part}"
        drawn = draw_scenes(name, count, form.timing, held_out=part == "test", seen=seen, offset=len(parts))
        parts += [(part, scene) for scene in drawn]
    return [
        form.item(scene, part, index, random.Random(f"{dataset}/{seed}/{index}"))
        for index, (part, scene) in enumerate(parts)
    ]


def write_item(item: Item, folder: Path, fps: int) -> None:
    """Write the video of an item."""
    write_video(item.scene, folder / item.file, fps)


def _descriptions(items: list[Item]) -> list[Description]:
    described = []
    for item in items:
        step = item.scene.duration / SEGMENTS
        for segment in range(SEGMENTS):
            start, end = round(segment * step, 3), round((segment + 1) * step, 3)
            caption = describe_segment(item.scene, start, end)
            described.append(Description(item.video_id, segment, start, end, caption, model="scene description"))
    return described


def _truth_of(item: Item, items: list[Item], fps: int) -> dict[str, Any]:
    scene = dataclasses.asdict(item.scene)
    if item.scene.twin is not None:
        scene["twin"] = items[item.scene.twin].video_id
    entries: list[dict[str, Any]] = []
    for index, caption in enumerate(item.captions):
        entry: dict[str, Any] = dataclasses.asdict(caption) | {"query": index == item.query}
        if caption.kind.startswith("event"):
            entry["span"] = span_of(caption, item.scene)
        entries.append(entry)
    return {
        "part": item.part,
        "file": item.file,
        "fps": fps,
        "duration": item.scene.duration,
        "scene": scene,
        "description": describe_scene(item.scene),
        "events": [describe_event(event) for event in item.scene.events],
        "captions": entries,
        "chinese": [caption.text for caption in item.chinese],
    }
