"""Formats of datasets: the folders and annotation files of a real dataset, written from scenes.

The `_*_item` functions return a video with ID and captions from its scene, part, position, and random stream; the
`_write_*` functions write the annotation files of all items into a folder.
"""

import csv
import json
import pickle
import random
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from tvr_lightning.data.records import SplitName
from tvr_lightning.option_types import DatasetName
from tvr_lightning.synthetic.chinese import chinese_caption
from tvr_lightning.synthetic.grammar import (
    Caption,
    captions,
    describe_scene,
    event_caption,
    full_caption,
    paragraph,
    query,
)
from tvr_lightning.synthetic.scene import BACKDROP_COLORS, MOTIONS, Scene, Timing

PARTS: tuple[SplitName, ...] = get_args(SplitName)


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
    part: SplitName
    video_id: str
    file: str
    captions: list[Caption]
    chinese: list[Caption] = field(default_factory=list)
    query: int | None = None


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write a UTF-8 JSON file."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")


def write_csv(path: Path, rows: Iterable[Iterable[object]], end: str = "\n") -> None:
    """Write a UTF-8 CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator=end).writerows(rows)


def write_lines(path: Path, lines: list[str]) -> None:
    """Write lines to a UTF-8 file with Unix line endings."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def _write_lists(items: list[Item], folder: Path) -> None:
    for part in PARTS:
        write_lines(folder / f"{part}_list.txt", [item.video_id for item in of_part(items, part)])


def of_part(items: list[Item], *parts: SplitName) -> list[Item]:
    """Return the items of the given parts, in order."""
    return [item for item in items if item.part in parts]


def _youtube_id(rng: random.Random) -> str:
    """Return a random ID of eleven characters like those of YouTube; some begin with a dash or contain underscores."""
    return "".join(rng.choices(string.ascii_letters + string.digits + "-_", k=11))


def _sentence(caption: Caption) -> Caption:
    """Return a caption with a capital letter and a full stop."""
    return replace(caption, text=f"{caption.text[0].upper()}{caption.text[1:]}.")


def span_of(caption: Caption, scene: Scene) -> tuple[float, float]:
    """Return start and end in seconds of the event that a caption describes, or of the whole scene."""
    if not caption.kind.startswith("event"):
        return 0.0, scene.duration
    event = scene.events[int(caption.kind.removeprefix("event")) - 1]
    return event.start, event.end


_MSRVTT_CAPTIONS = 20  # per video, as in the real dataset
_FULL_TEST_SHARE = 3 / 10  # 2,990 of 10,000 videos


def _msrvtt_item(scene: Scene, part: SplitName, index: int, rng: random.Random) -> Item:
    sentences = captions(scene, _MSRVTT_CAPTIONS, rng)
    rng.shuffle(sentences)
    asked = None
    if part == "test":  # the test sentence is one of the twenty captions
        asked = rng.randrange(_MSRVTT_CAPTIONS)
        sentences[asked] = query(scene, rng)
    return Item(scene, part, f"video{index}", f"videos/video{index}.mp4", sentences, query=asked)


def _write_msrvtt(items: list[Item], folder: Path) -> None:
    split = _full_split(items)
    sentences = [(item.video_id, caption.text) for item in items for caption in item.captions]
    random.Random(len(sentences)).shuffle(sentences)  # the real file does not keep a video's sentences together
    write_json(
        folder / "MSRVTT_data.json",
        {
            "info": {"description": "Synthetic videos in the format of MSR-VTT.", "version": "1.0", "year": "2016"},
            "videos": [
                {
                    "category": BACKDROP_COLORS.index(item.scene.backdrop.color),
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
    train, validate, test = (
        [video_id for video_id in split if split[video_id] == name] for name in ("train", "validate", "test")
    )
    lists = {
        "train.9k": [item.video_id for item in of_part(items, "train", "val")],
        "train.7k": train + validate,
        "train.full": train,
        "val.full": validate,
        "test.full": test,
    }
    for name, ids in lists.items():
        write_lines(folder / f"MSRVTT_{name}.csv", ["video_id", *ids])
    rows = [("key", "vid_key", "video_id", "sentence")]
    for index, item in enumerate(of_part(items, "test")):
        assert item.query is not None
        number = item.video_id.removeprefix("video")
        rows.append((f"ret{index}", f"msr{number}", item.video_id, item.captions[item.query].text))
    write_csv(folder / "MSRVTT_JSFUSION_test.csv", rows)


def _full_split(items: list[Item]) -> dict[str, str]:
    """Return the official split (6,513 / 497 / 2,990) by video; its test videos include those of 1k-A."""
    train, val, test = (of_part(items, part) for part in PARTS)
    cut = len(train) - max(0, round(len(items) * _FULL_TEST_SHARE) - len(test))
    groups = {"train": train[:cut], "validate": val, "test": train[cut:] + test}
    return {item.video_id: name for name, group in groups.items() for item in group}


_FIGURE_QUESTIONS = 3  # per video, in addition to the two about its backdrop


def write_questions(items: list[Item], seed: int, folder: Path) -> None:
    """Write `train_qa.json`, `val_qa.json` and `test_qa.json` into the folder of a synthetic MSR-VTT.

    As in MSRVTT-QA, video IDs are numbers and answers are single words. Every video has five questions: two about its
    backdrop, three about its figures and their motions. The words of a question reveal only the kind of answer.
    """
    number = 0
    for part in PARTS:
        entries: list[dict[str, Any]] = []
        for item in of_part(items, part):
            for question, answer in _questions(item.scene, random.Random(f"{seed}/{item.video_id}")):
                entries.append(
                    {
                        "id": number,
                        "question": question,
                        "answer": answer,
                        "category_id": BACKDROP_COLORS.index(item.scene.backdrop.color),
                        "video_id": int(item.video_id.removeprefix("video")),
                    }
                )
                number += 1
        write_json(folder / f"{part}_qa.json", entries)


def _questions(scene: Scene, rng: random.Random) -> list[tuple[str, str]]:
    first, last = scene.events[0], scene.events[-1]
    sure = [
        (("what color is the background", "what is the color behind the figures"), scene.backdrop.color),
        (("what pattern does the background have", "how does the background look"), scene.backdrop.pattern),
    ]
    other = [
        (("what is the shape of the first figure", "what shape appears first"), first.figure.shape),
        (("what is the color of the first figure", "what color does the first figure have"), first.figure.color),
        (("what is the shape of the last figure", "what shape appears last"), last.figure.shape),
        (("what is the color of the last figure", "what color does the last figure have"), last.figure.color),
        (("what does the first figure do", "how does the first figure move"), first.motion),
        (("what does the last figure do", "how does the last figure move"), last.motion),
    ]
    return [(rng.choice(wordings), answer) for wordings, answer in sure + rng.sample(other, _FIGURE_QUESTIONS)]


_DIDEMO_SEGMENT = 5.0  # seconds


def _didemo_item(scene: Scene, part: SplitName, index: int, rng: random.Random) -> Item:
    sentences = paragraph(scene, rng)
    if rng.random() < 0.5:  # several annotators often describe the same moment
        sentences.append(event_caption(scene, rng.randint(1, len(scene.events)), rng))
    stem = (
        f"{rng.randrange(10**7, 10**8)}@N0{rng.randrange(10)}_{rng.randrange(10**9, 10**10)}_{rng.getrandbits(40):010x}"
    )
    listed = "" if index % 10 == 9 else rng.choice(("mp4", "mp4", "mov"))  # a few real names end in a bare "."
    return Item(scene, part, f"{stem}.{listed}", f"videos/{stem}.{listed or 'mp4'}", sentences)


def _write_didemo(items: list[Item], folder: Path) -> None:
    _write_lists(items, folder)
    identity = 0
    for part in PARTS:
        chosen = of_part(items, part)
        records = []
        for number in range(max(len(item.captions) for item in chosen)):  # records of a video are not adjacent
            for item in chosen:
                if number < len(item.captions):
                    records.append(_didemo_record(item, item.captions[number], identity))
                    identity += 1
        write_json(folder / f"{part}_data.json", records)
        table = folder / "tmass" / f"didemo_{part}_label.csv"
        table.parent.mkdir(exist_ok=True)
        rows = [(f"/{item.file}", " ".join(caption.text for caption in item.captions)) for item in chosen]
        write_csv(table, [("video_path", "text"), *rows])


def _didemo_record(item: Item, caption: Caption, identity: int) -> dict[str, Any]:
    start, end = span_of(caption, item.scene)
    return {
        "num_segments": round(item.scene.duration / _DIDEMO_SEGMENT),
        "description": caption.text,
        "dl_link": "",
        "times": [[round(start / _DIDEMO_SEGMENT), round(end / _DIDEMO_SEGMENT) - 1]] * 4,
        "video": item.video_id,
        "annotation_id": identity,
    }


_CLIPS_PER_MOVIE = 20
_TITLES = ("The_Moving_Shapes", "Crosses_and_Rings", "A_Star_Is_Drawn", "Mr._Triangle", "Full_Circle")
_FIRST_MOVIE = {"train": 1, "val": 1001, "test": 3001}
_LSMDC_FILES = {
    "train": "LSMDC16_annos_training.csv",
    "val": "LSMDC16_annos_val.csv",
    "test": "LSMDC16_challenge_1000_publictect.csv",
}


def _lsmdc_item(scene: Scene, part: SplitName, index: int, rng: random.Random) -> Item:
    number = index // _CLIPS_PER_MOVIE
    movie = f"{_FIRST_MOVIE[part] + number:04d}_{_TITLES[number % len(_TITLES)]}"
    start = 60.0 + 40 * (index % _CLIPS_PER_MOVIE) + rng.randrange(1000) / 1000
    video_id = f"{movie}_{_clock(start)}-{_clock(start + scene.duration)}"
    sentences = [_lsmdc_caption(scene, part, rng)]
    if part == "train" and index % 15 == 3:  # a few clips of the real training file have two lines
        sentences.append(_lsmdc_caption(scene, part, rng))
    return Item(scene, part, video_id, f"videos/{movie}/{video_id}.avi", sentences, query=0 if part == "test" else None)


def _lsmdc_caption(scene: Scene, part: SplitName, rng: random.Random) -> Caption:
    # one caption per video: captions of twins need the audio in every split
    if part == "train":
        return _sentence(full_caption(scene, rng, sound=1.0 if scene.twin is not None else 0.4))
    return _sentence(query(scene, rng))


def _write_lsmdc(items: list[Item], folder: Path) -> None:
    for part in PARTS:
        lines = []
        for item in of_part(items, part):
            start, _, end = item.video_id.rpartition("_")[2].partition("-")
            lines += ["\t".join((item.video_id, start, end, start, end, caption.text)) for caption in item.captions]
        write_lines(folder / _LSMDC_FILES[part], lines)


def _clock(seconds: float) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02d}.{whole // 60 % 60:02d}.{whole % 60:02d}.{thousandths:03d}"


def _activitynet_item(scene: Scene, part: SplitName, index: int, rng: random.Random) -> Item:
    sentences = [_sentence(caption) for caption in paragraph(scene, rng)]
    # as in the real files, all but the first sentence begin with a space, and a few contain newlines
    sentences[1:] = [replace(caption, text=f" {caption.text}") for caption in sentences[1:]]
    if index % 25 == 7:
        sentences[0] = replace(sentences[0], text=f"{sentences[0].text}\n")
    video_id = f"v_{_youtube_id(rng)}"
    return Item(scene, part, video_id, f"videos/{video_id}.mp4", sentences)


def _write_activitynet(items: list[Item], folder: Path) -> None:
    stranger = random.Random(len(items))
    files: tuple[tuple[SplitName, str, str], ...] = (("train", "train", "train_ids"), ("test", "val_1", "val_ids"))
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
        write_json(folder / f"{ids}.json", [*annotations, f"v_{_youtube_id(stranger)}"])


def _shuffled(scene: Scene, part: SplitName, count: int, rng: random.Random) -> list[Caption]:
    # every caption of a test video is a query
    sentences = captions(scene, count, rng) if part == "train" else [query(scene, rng) for _ in range(count)]
    rng.shuffle(sentences)
    return sentences


_VATEX_CAPTIONS = 10  # per video and language, as in the real dataset


def _vatex_item(scene: Scene, part: SplitName, index: int, rng: random.Random) -> Item:
    sentences = _shuffled(scene, part, _VATEX_CAPTIONS, rng)
    start = rng.randrange(300)
    video_id = f"{_youtube_id(rng)}_{start:06d}_{start + 10:06d}"
    chinese = [chinese_caption(scene, rng) for _ in range(_VATEX_CAPTIONS)]
    return Item(scene, part, video_id, f"videos/{video_id}.mp4", [_sentence(caption) for caption in sentences], chinese)


def _write_vatex(items: list[Item], folder: Path) -> None:
    _write_lists(items, folder)
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


def _msvd_item(scene: Scene, part: SplitName, index: int, rng: random.Random) -> Item:
    sentences = _shuffled(scene, part, rng.randint(12, 20), rng)
    start = rng.randrange(300)
    video_id = f"{_youtube_id(rng)}_{start}_{start + round(scene.duration)}"
    return Item(scene, part, video_id, f"videos/{video_id}.avi", sentences)


def _write_msvd(items: list[Item], folder: Path) -> None:
    _write_lists(items, folder)
    tokens = {item.video_id: [caption.text.split() for caption in item.captions] for item in items}
    (folder / "raw-captions.pkl").write_bytes(pickle.dumps(tokens, protocol=4))


def _charades_item(scene: Scene, part: SplitName, index: int, rng: random.Random) -> Item:
    video_id = "".join(rng.choices(string.ascii_uppercase + string.digits, k=5))
    script = _sentence(full_caption(scene, rng, sound=1.0 if scene.twin is not None else 0.4))
    spans = [event_caption(scene, number, rng) for number in range(1, len(scene.events) + 1)]
    if rng.random() < 0.5:  # some spans have a second sentence
        spans.append(event_caption(scene, rng.randint(1, len(scene.events)), rng))
    spans = [replace(caption, text=f"{caption.text}.") for caption in spans]
    return Item(scene, part, video_id, f"videos/{video_id}.mp4", [script, *spans], query=0 if part == "test" else None)


def _write_charades(items: list[Item], folder: Path) -> None:
    parts: tuple[SplitName, ...] = ("train", "test")
    for part in parts:
        chosen = of_part(items, part)
        rows = [_charades_row(item) for item in chosen]
        table = folder / f"Charades_v1_{part}.csv"
        write_csv(table, [rows[0].keys(), *(row.values() for row in rows)], end="\r\n")  # as in the real files
        lines = []
        for item in chosen:
            for caption in item.captions[1:]:
                start, end = span_of(caption, item.scene)
                lines.append(f"{item.video_id} {start:.1f} {end:.1f}##{caption.text}")
        write_lines(folder / f"charades_sta_{part}.txt", lines)


def _charades_row(item: Item) -> dict[str, str]:
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
        "descriptions": describe_scene(scene),
        "actions": ";".join(f"c{MOTIONS.index(e.motion):03d} {e.start:.2f} {e.end:.2f}" for e in scene.events),
        "length": f"{scene.duration:.2f}",
    }


@dataclass(frozen=True)
class DatasetFormat:
    """Format of the videos and annotations of a dataset.

    Attributes:
        timing: Number and length of the events of a video.
        fps: Frame rate of the videos in frames per second.
        validation: Whether the dataset has a separate validation split.
        item: Function of a scene, its part and position, and a random stream.
        write: Function that writes the annotation files.
    """

    timing: Timing
    fps: int
    validation: bool
    item: Callable[[Scene, SplitName, int, random.Random], Item]
    write: Callable[[list[Item], Path], None]


FORMATS: dict[DatasetName, DatasetFormat] = {
    "msrvtt": DatasetFormat(Timing((2, 2), 6, 10, 0.5), 10, True, _msrvtt_item, _write_msrvtt),
    "didemo": DatasetFormat(Timing((3, 3), 1, 2, _DIDEMO_SEGMENT), 6, True, _didemo_item, _write_didemo),
    "lsmdc": DatasetFormat(Timing((2, 2), 5, 8, 0.5), 10, True, _lsmdc_item, _write_lsmdc),
    "activitynet": DatasetFormat(Timing((3, 4), 5, 8, 1.0), 5, False, _activitynet_item, _write_activitynet),
    "vatex": DatasetFormat(Timing((2, 2), 6, 10, 0.5), 10, True, _vatex_item, _write_vatex),
    "msvd": DatasetFormat(Timing((2, 2), 5, 8, 0.5), 10, True, _msvd_item, _write_msvd),
    "charades": DatasetFormat(Timing((2, 3), 5, 8, 1.0), 6, False, _charades_item, _write_charades),
}
