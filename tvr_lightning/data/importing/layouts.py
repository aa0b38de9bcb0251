"""Common annotation layouts of each dataset, and their conversion to the expected layout."""

import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tvr_lightning.data.activitynet import FILES as ACTIVITYNET_FILES
from tvr_lightning.data.activitynet import ActivityNet
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.charades import Charades
from tvr_lightning.data.didemo import DiDeMo
from tvr_lightning.data.lsmdc import FILES as LSMDC_FILES
from tvr_lightning.data.lsmdc import LSMDC
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.msvd import MSVD
from tvr_lightning.data.records import SplitName, expect, malformed, read_json, read_lines
from tvr_lightning.data.vatex import VATEX
from tvr_lightning.data.video_files import stem

Files = dict[str, Path]
Converted = dict[str, bytes]
Counts = dict[SplitName, int]
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class AnnotationLayout:
    """Annotation layout of a dataset; a dataset can have several with one name, of which the fullest applies.

    `needed` and `further` (optional) map the key or expected name of each file to the pattern of its source. `convert`
    returns file contents by name; None copies files unchanged. `note` is a difference of the data in this layout.
    """

    name: str
    needed: Mapping[str, str]
    convert: Callable[[Files], Converted] | None = None
    further: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def find(self, folder: Path) -> tuple[Files, list[str]]:
        """Return the files of a folder that belong to the layout, and the names of the missing ones."""
        files = sorted((path for path in folder.iterdir() if path.is_file()), reverse=True)
        # Of several matching files, the first one in alphabetical order is used.
        found = {
            ours: path
            for ours, pattern in {**self.needed, **self.further}.items()
            for path in files
            if re.fullmatch(pattern, path.name, re.IGNORECASE)
        }
        missing = [pattern for ours, pattern in self.needed.items() if ours not in found]
        return found, [re.sub(r"\(\w+[^()]*\)\?|\\|\?", "", pattern) for pattern in missing]


def _same(*names: str) -> dict[str, str]:
    return {name: re.escape(name) for name in names}


def _hub(prefix: str, *splits: str) -> dict[str, str]:
    return {split: rf"{prefix}(_ret)?_{split}\.json" for split in splits}


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode()


def _lines(values: Any) -> bytes:
    return "".join(f"{value}\n" for value in values).encode()


def _csv(columns: list[str], rows: Iterable[Sequence[str]]) -> bytes:
    return pd.DataFrame(list(rows), columns=columns).to_csv(index=False, lineterminator="\r\n").encode()


def read_hub_list(file: Path) -> dict[str, list[str]]:
    """Return the captions of every video of a list `[{"video": ..., "caption": ...}, ...]`, in file order.

    A record identifies its video by `video_id`, or by its file under `video`. Its `caption` is one caption or a list of
    captions; `sentences`, as in ActivityNet, are used instead if present. Records of one video are merged.
    """
    captions: dict[str, list[str]] = {}
    for number, record in enumerate(read_json(file, [dict])):
        entry = f"[{number}]"
        key = "sentences" if "sentences" in record else "caption"
        name = record.get("video_id") or stem(Path(expect(file, entry, record, {"video": str})["video"]).name)
        texts = expect(file, entry, record, {key: object})[key]
        found = captions.setdefault(expect(file, f"{entry}, video_id", name, str), [])
        found += expect(file, f"{entry}, {key}", texts if isinstance(texts, list) else [texts], [str])
    return captions


def _msrvtt_from_hub(files: Files) -> Converted:
    training = {name: read_hub_list(files[name]) for name in ("9k", "7k") if name in files}
    captions: dict[str, list[str]] = {}
    for found in training.values():
        captions |= {video: said for video, said in found.items() if video not in captions}
    pairs = []
    for number, (video, said) in enumerate(read_hub_list(files["test"]).items()):
        if len(said) != 1:
            message = f"{len(said)} captions, but the protocol has one per video"
            raise malformed(files["test"], video, message, "use the protocol's pairs")
        pairs.append([f"ret{number}", f"msr{video.removeprefix('video')}", video, said[0].strip()])
    sentences = [{"video_id": video, "caption": text} for video, said in captions.items() for text in said]
    return {
        "MSRVTT_data.json": _json({"videos": [{"video_id": video} for video in captions], "sentences": sentences}),
        "MSRVTT_JSFUSION_test.csv": _csv(["key", "vid_key", "video_id", "sentence"], pairs),
        **{f"MSRVTT_train.{name}.csv": _csv(["video_id"], [[v] for v in found]) for name, found in training.items()},
    }


def _msrvtt_from_official(files: Files) -> Converted:
    shape = {"videos": [{"video_id": str, "split": str}], "sentences": list}
    train_val, test = read_json(files["train_val"], shape), read_json(files["test"], shape)
    videos = train_val["videos"] + test["videos"]
    converted = {"MSRVTT_data.json": _json({"videos": videos, "sentences": train_val["sentences"] + test["sentences"]})}
    for theirs, ours in (("train", "train"), ("validate", "val"), ("test", "test")):
        listed = [[video["video_id"]] for video in videos if video["split"] == theirs]
        converted[f"MSRVTT_{ours}.full.csv"] = _csv(["video_id"], listed)
    return converted


def _msvd(splits: Mapping[str, Iterable[str]], captions: Mapping[str, list[str]]) -> Converted:
    tokens = {video: [text.split() for text in said] for video, said in captions.items()}
    lists = {f"{name}_list.txt": _lines(videos) for name, videos in splits.items()}
    return {"raw-captions.pkl": pickle.dumps(tokens, protocol=4), **lists}


def _msvd_from_hub(files: Files) -> Converted:
    found = {name: read_hub_list(files[name]) for name in SPLITS}
    return _msvd(found, found["train"] | found["val"] | found["test"])


def _msvd_from_official(files: Files) -> Converted:
    captions: dict[str, list[str]] = {}
    for line in read_lines(files["captions"]):
        video, _, text = line.partition(" ")
        if not line.startswith("#"):
            captions.setdefault(video, []).append(text)
    return _msvd({name: read_lines(files[f"{name}_list.txt"]) for name in SPLITS}, captions)


def _didemo_from_hub(files: Files) -> Converted:
    converted: Converted = {}
    for name, file in files.items():
        found = read_hub_list(file)
        moments = [{"video": video, "description": text} for video, said in found.items() for text in said]
        converted |= {f"{name}_list.txt": _lines(found), f"{name}_data.json": _json(moments)}
    return converted


def _didemo_from_official(files: Files) -> Converted:
    converted = {name: file.read_bytes() for name, file in files.items()}
    for name, file in files.items():
        listed = dict.fromkeys(moment["video"] for moment in read_json(file, [{"video": str}]))
        converted[name.replace("_data.json", "_list.txt")] = _lines(listed)
    return converted


def _activitynet_from_hub(files: Files) -> Converted:
    converted = {}
    for name, (ids, sentences) in ACTIVITYNET_FILES.items():
        found = read_hub_list(files[name])
        converted[ids] = _json(list(found))
        converted[sentences] = _json({video: {"sentences": said} for video, said in found.items()})
    return converted


def _vatex_from_hub(files: Files) -> Converted:
    found = {name: read_hub_list(files[name]) for name in SPLITS}
    captions = {video: {"enCap": said} for listed in found.values() for video, said in listed.items()}
    return {"vatex_data.json": _json(captions), **{f"{name}_list.txt": _lines(found[name]) for name in SPLITS}}


def _lsmdc_from_hub(files: Files) -> Converted:
    converted = {}
    for name, ours in LSMDC_FILES.items():
        rows = []
        for clip, said in read_hub_list(files[name]).items():
            start, _, end = clip.rpartition("_")[2].partition("-")
            rows += ["\t".join((clip, start, end, start, end, " ".join(text.split()))) for text in said]
        converted[ours] = _lines(rows)
    return converted


MSRVTT_TEST = {"test": r"msrvtt(_ret)?_test_?1k\.json"}
MSRVTT_9K, MSRVTT_7K = ({name: rf"msrvtt(_ret)?_train_?{name}\.json"} for name in ("9k", "7k"))
MSRVTT_FILES = _same("MSRVTT_data.json", "MSRVTT_JSFUSION_test.csv")
MSRVTT_FULL = _same(*(f"MSRVTT_{name}.full.csv" for name in SPLITS))
LISTS = _same(*(f"{name}_list.txt" for name in SPLITS))
DESCRIPTIONS = _same(*(f"{name}_data.json" for name in SPLITS))

DATASETS: dict[str, type[TextVideoDataModule]] = {
    dataset.directory: dataset for dataset in (MSRVTT, MSVD, DiDeMo, ActivityNet, VATEX, LSMDC, Charades)
}
"""Supported datasets for import, by folder name."""

LAYOUTS = {
    "msrvtt": [
        # With the list of 9,000 or of 7,010 training videos, or with both
        AnnotationLayout("hub", MSRVTT_TEST | MSRVTT_9K, _msrvtt_from_hub, MSRVTT_7K),
        AnnotationLayout("hub", MSRVTT_TEST | MSRVTT_7K, _msrvtt_from_hub),
        AnnotationLayout(
            "clip4clip",
            MSRVTT_FILES | _same("MSRVTT_train.9k.csv"),
            further=MSRVTT_FULL | _same("MSRVTT_train.7k.csv"),
        ),
        AnnotationLayout("clip4clip", MSRVTT_FILES | _same("MSRVTT_train.7k.csv"), further=MSRVTT_FULL),
        AnnotationLayout(
            "official",
            {"train_val": r"train_val_videodatainfo\.json", "test": r"test_videodatainfo\.json"},
            _msrvtt_from_official,
            note="it has only the official split (data.init_args.split=full), not the 1k-A pairs of the papers, "
            "which are in the layouts of the Hub and of CLIP4Clip",
        ),
    ],
    "msvd": [
        AnnotationLayout("hub", _hub("msvd", *SPLITS), _msvd_from_hub),
        AnnotationLayout("clip4clip", LISTS | _same("raw-captions.pkl")),
        AnnotationLayout(
            "official",
            {"captions": r"AllVideoDescriptions\.txt"} | LISTS,
            _msvd_from_official,
            note="its captions keep punctuation that raw-captions.pkl of CLIP4Clip replaces with spaces, such as it's "
            "for it s",
        ),
    ],
    "didemo": [
        AnnotationLayout("hub", _hub("didemo", "train", "test"), _didemo_from_hub, _hub("didemo", "val")),
        AnnotationLayout("clip4clip", LISTS | DESCRIPTIONS),
        AnnotationLayout("tmass", {f"tmass/didemo_{name}_label.csv": rf"didemo_{name}_label\.csv" for name in SPLITS}),
        AnnotationLayout(
            "official",
            DESCRIPTIONS,
            _didemo_from_official,
            note="without CLIP4Clip's lists, all its videos are used",
        ),
    ],
    "activitynet": [
        AnnotationLayout(
            "hub",
            _hub("activitynet_captions", "train") | {"test": r"activitynet_captions(_ret)?_val1\.json"},
            _activitynet_from_hub,
        ),
        AnnotationLayout("official", _same("train.json", "val_1.json", "train_ids.json", "val_ids.json")),
    ],
    "vatex": [
        AnnotationLayout("hub", _hub("vatex", *SPLITS), _vatex_from_hub),
        AnnotationLayout("hgr", LISTS | _same("vatex_data.json")),
        AnnotationLayout(
            "official",
            LISTS | _same("vatex_training_v1.0.json", "vatex_validation_v1.0.json"),
            note="read them with data.init_args.annotations=official",
        ),
    ],
    "lsmdc": [
        AnnotationLayout(
            "hub", _hub("lsmdc", "train", "val") | {"test": r"lsmdc(_ret)?_test(_1000)?\.json"}, _lsmdc_from_hub
        ),
        AnnotationLayout("official", _same(*LSMDC_FILES.values())),
    ],
    "charades": [
        AnnotationLayout(
            "official",
            _same("Charades_v1_train.csv", "Charades_v1_test.csv"),
            further=_same("charades_sta_train.txt", "charades_sta_test.txt"),
        ),
    ],
}
"""Layouts of each dataset."""

VATEX_VIDEOS: Counts = {"train": 25991, "val": 1500, "test": 1500}
PUBLISHED: dict[str, list[tuple[dict[str, Any], Counts]]] = {
    "msrvtt": [
        ({"split": "9k"}, {"train": 9000, "test": 1000}),
        ({"split": "7k"}, {"train": 7010, "test": 1000}),
        ({"split": "full"}, {"train": 6513, "val": 497, "test": 2990}),
    ],
    "msvd": [({}, {"train": 1200, "val": 100, "test": 670})],
    "didemo": [
        ({"split": "lists"}, {"train": 8392, "val": 1065, "test": 1004}),
        ({"split": "hub"}, {"train": 8392, "test": 1004}),
        ({"split": "tmass"}, {"train": 8362, "val": 1062, "test": 1004}),
    ],
    "activitynet": [({}, {"train": 10009, "test": 4917})],
    "vatex": [({}, VATEX_VIDEOS), ({"annotations": "official"}, VATEX_VIDEOS)],
    "lsmdc": [({}, {"test": 1000})],
    "charades": [({"split": "scripts"}, {"train": 7985, "test": 1863}), ({"split": "sta"}, {})],
}
"""Options of each dataset, each with the published number of videos by split."""
