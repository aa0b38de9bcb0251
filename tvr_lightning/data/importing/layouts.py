"""Common annotation layouts of each dataset, and their conversion to the expected layout."""

from __future__ import annotations

import csv
import io
import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvr_lightning.data.activitynet import ActivityNet
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.charades import Charades
from tvr_lightning.data.didemo import DiDeMo
from tvr_lightning.data.importing.hub_lists import read_hub_list, single
from tvr_lightning.data.lsmdc import CLIP, LSMDC
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.msvd import MSVD
from tvr_lightning.data.records import SplitName, expect, field_of, malformed, read_json, read_lines
from tvr_lightning.data.vatex import VATEX

Files = dict[str, Path]
Converted = dict[str, bytes]
Convert = Callable[[Files], Converted]


@dataclass(frozen=True)
class Layout:
    """Annotation layout of a dataset.

    Attributes:
        name: Name for the option `--layout`.
        needed: Required files that identify the layout: expected file name mapped to a pattern of the source file.
        further: Optional files, in the same form.
        either: Names in `further` of which at least one is required; empty if none is.
        convert: Function from source files, by expected name, to file contents by name; None copies files unchanged.
        note: Difference of data in this layout.
    """

    name: str
    needed: Mapping[str, str]
    further: Mapping[str, str]
    either: tuple[str, ...] = ()
    convert: Convert | None = None
    note: str = ""

    def find(self, names: Mapping[str, Path]) -> tuple[Files, list[str]]:
        """Return the files of a folder that belong to the layout, and descriptions of the missing ones."""
        found: Files = {}
        for ours, pattern in {**self.needed, **self.further}.items():
            match = next((name for name in sorted(names) if re.fullmatch(pattern, name, re.IGNORECASE)), None)
            if match is not None:
                found[ours] = names[match]
        missing = [_shown(pattern) for ours, pattern in self.needed.items() if ours not in found]
        if self.either and not any(ours in found for ours in self.either):
            missing.append(" or ".join(_shown(self.further[ours]) for ours in self.either))
        return found, missing


@dataclass(frozen=True)
class Reading:
    """Configuration of a dataset with the number of videos in its protocol.

    Attributes:
        options: Options of the dataset class.
        counts: Number of videos by split.
    """

    options: Mapping[str, Any]
    counts: Mapping[SplitName, int]


@dataclass(frozen=True)
class Source:
    """Dataset with its supported layouts and configurations."""

    kind: type[TextVideoDataModule]
    layouts: tuple[Layout, ...]
    readings: tuple[Reading, ...]


def _shown(pattern: str) -> str:
    """Return a file name that matches a pattern, for messages."""
    return re.sub(r"\((\w+)[^()]*\)\?", "", pattern).replace("\\", "").replace("_?", "_").replace("?", "")


def _same(*names: str) -> dict[str, str]:
    return {name: re.escape(name) for name in names}


def _hub(prefix: str, *splits: str) -> dict[str, str]:
    return {split: rf"{prefix}(_ret)?_{split}\.json" for split in splits}


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode()


def _lines(values: Any) -> bytes:
    return "".join(f"{value}\n" for value in values).encode()


def _csv(header: list[str], rows: list[list[str]]) -> bytes:
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(header)
    writer.writerows(rows)
    return table.getvalue().encode()


# MSR-VTT


def _msrvtt_from_hub(files: Files) -> Converted:
    training = {name: read_hub_list(files[name]) for name in ("9k", "7k") if name in files}
    captions: dict[str, list[str]] = {}
    for found in training.values():
        for video, said in found.items():
            captions.setdefault(video, said)
    test = single(files["test"], read_hub_list(files["test"]))
    pairs = [[f"ret{i}", f"msr{_number(video)}", video, text] for i, (video, text) in enumerate(test.items())]
    return {
        "MSRVTT_data.json": _msrvtt_data(captions),
        "MSRVTT_JSFUSION_test.csv": _csv(["key", "vid_key", "video_id", "sentence"], pairs),
        **{f"MSRVTT_train.{name}.csv": _csv(["video_id"], [[v] for v in found]) for name, found in training.items()},
    }


def _number(video: str) -> str:
    return video.removeprefix("video")


def _msrvtt_data(captions: Mapping[str, list[str]]) -> bytes:
    return _json(
        {
            "videos": [{"video_id": video} for video in captions],
            "sentences": [{"video_id": video, "caption": text} for video, said in captions.items() for text in said],
        }
    )


def _msrvtt_from_official(files: Files) -> Converted:
    videos: list[Any] = []
    sentences: list[Any] = []
    for file in (files["train_val"], files["test"]):
        data = read_json(file)
        videos += field_of(file, "top level", data, "videos", list)
        sentences += field_of(file, "top level", data, "sentences", list)
    named = {"train": "train", "validate": "val", "test": "test"}
    lists: dict[str, list[list[str]]] = {ours: [] for ours in named.values()}
    for number, video in enumerate(videos):
        entry = f"videos[{number}]"
        split = field_of(files["train_val"], entry, video, "split", str)
        if split not in named:
            raise malformed(files["train_val"], entry, f"split {split!r}", f"write one of {', '.join(named)}")
        lists[named[split]].append([field_of(files["train_val"], entry, video, "video_id", str)])
    return {
        "MSRVTT_data.json": _json({"videos": videos, "sentences": sentences}),
        **{f"MSRVTT_{name}.full.csv": _csv(["video_id"], rows) for name, rows in lists.items()},
    }


# MSVD


def _msvd(splits: Mapping[str, list[str]], captions: Mapping[str, list[str]]) -> Converted:
    tokens = {video: [text.split() for text in said] for video, said in captions.items()}
    return {
        "raw-captions.pkl": pickle.dumps(tokens, protocol=4),
        **{f"{name}_list.txt": _lines(videos) for name, videos in splits.items()},
    }


def _msvd_from_hub(files: Files) -> Converted:
    found = {name: read_hub_list(files[name]) for name in ("train", "val", "test")}
    captions = {video: said for listed in found.values() for video, said in listed.items()}
    return _msvd({name: list(listed) for name, listed in found.items()}, captions)


def _msvd_from_official(files: Files) -> Converted:
    captions: dict[str, list[str]] = {}
    for line in read_lines(files["captions"]):
        video, _, text = line.partition(" ")
        if not line.startswith("#"):
            captions.setdefault(video, []).append(text)
    return _msvd({name: read_lines(files[name]) for name in ("train", "val", "test")}, captions)


# DiDeMo


def _didemo_from_hub(files: Files) -> Converted:
    converted = {}
    for name in ("train", "val", "test"):
        if name in files:
            said = single(files[name], read_hub_list(files[name]), joined=True)
            converted[f"{name}_list.txt"] = _lines(said)
            converted[f"{name}_data.json"] = _json([{"video": v, "description": text} for v, text in said.items()])
    return converted


def _didemo_from_official(files: Files) -> Converted:
    converted = {}
    for name, file in files.items():
        moments = expect(file, "top level", read_json(file), list, "write a list of moments")
        listed = [field_of(file, f"[{number}]", moment, "video", str) for number, moment in enumerate(moments)]
        converted[name] = file.read_bytes()
        converted[name.replace("_data.json", "_list.txt")] = _lines(dict.fromkeys(listed))
    return converted


# ActivityNet Captions, VATEX, LSMDC


def _activitynet_from_hub(files: Files) -> Converted:
    converted = {}
    for name, (ids, sentences) in {
        "train": ("train_ids.json", "train.json"),
        "val1": ("val_ids.json", "val_1.json"),
    }.items():
        found = read_hub_list(files[name])
        converted[ids] = _json(list(found))
        converted[sentences] = _json({video: {"sentences": said} for video, said in found.items()})
    return converted


def _vatex_from_hub(files: Files) -> Converted:
    found = {name: read_hub_list(files[name]) for name in ("train", "val", "test")}
    captions = {video: {"enCap": said} for listed in found.values() for video, said in listed.items()}
    return {
        "vatex_data.json": _json(captions),
        **{f"{name}_list.txt": _lines(listed) for name, listed in found.items()},
    }


LSMDC_FILES = {
    "train": "LSMDC16_annos_training.csv",
    "val": "LSMDC16_annos_val.csv",
    "test": "LSMDC16_challenge_1000_publictect.csv",
}


def _lsmdc_from_hub(files: Files) -> Converted:
    converted = {}
    for name, ours in LSMDC_FILES.items():
        rows = []
        for clip, said in read_hub_list(files[name]).items():
            if CLIP.fullmatch(clip) is None:
                raise malformed(files[name], clip, "no clip id", "write <movie>_HH.MM.SS.mmm-HH.MM.SS.mmm")
            start, _, end = clip.rpartition("_")[2].partition("-")
            rows += ["\t".join((clip, start, end, start, end, " ".join(text.split()))) for text in said]
        converted[ours] = _lines(rows)
    return converted


LISTS = _same("train_list.txt", "val_list.txt", "test_list.txt")
DIDEMO = _same("train_data.json", "val_data.json", "test_data.json")
TMASS = {f"tmass/didemo_{name}_label.csv": rf"didemo_{name}_label\.csv" for name in ("train", "val", "test")}
PUNCTUATION = (
    "its captions keep punctuation that raw-captions.pkl of CLIP4Clip replaces with spaces, such as it's for it s"
)

SOURCES: dict[str, Source] = {
    "msrvtt": Source(
        MSRVTT,
        (
            Layout(
                "hub",
                {"test": r"msrvtt(_ret)?_test_?1k\.json"},
                {"9k": r"msrvtt(_ret)?_train_?9k\.json", "7k": r"msrvtt(_ret)?_train_?7k\.json"},
                ("9k", "7k"),
                _msrvtt_from_hub,
            ),
            Layout(
                "clip4clip",
                _same("MSRVTT_data.json", "MSRVTT_JSFUSION_test.csv"),
                _same(
                    "MSRVTT_train.9k.csv", "MSRVTT_train.7k.csv",
                    "MSRVTT_train.full.csv", "MSRVTT_val.full.csv", "MSRVTT_test.full.csv",
                ),
                ("MSRVTT_train.9k.csv", "MSRVTT_train.7k.csv"),
            ),
            Layout(
                "official",
                {"train_val": r"train_val_videodatainfo\.json", "test": r"test_videodatainfo\.json"},
                {},
                (),
                _msrvtt_from_official,
                "it has only the official split (data.init_args.split=full), not the 1k-A pairs of the papers, which "
                "are in the layouts of the Hub and of CLIP4Clip",
            ),
        ),
        (
            Reading({"split": "9k"}, {"train": 9000, "test": 1000}),
            Reading({"split": "7k"}, {"train": 7010, "test": 1000}),
            Reading({"split": "full"}, {"train": 6513, "val": 497, "test": 2990}),
        ),
    ),
    "msvd": Source(
        MSVD,
        (
            Layout("hub", _hub("msvd", "train", "val", "test"), {}, (), _msvd_from_hub),
            Layout("clip4clip", {**LISTS, **_same("raw-captions.pkl")}, {}),
            Layout(
                "official",
                {
                    "captions": r"AllVideoDescriptions\.txt",
                    **{name: rf"{name}_list\.txt" for name in ("train", "val", "test")},
                },
                {},
                (),
                _msvd_from_official,
                PUNCTUATION,
            ),
        ),
        (Reading({}, {"train": 1200, "val": 100, "test": 670}),),
    ),
    "didemo": Source(
        DiDeMo,
        (
            Layout("hub", _hub("didemo", "train", "test"), _hub("didemo", "val"), (), _didemo_from_hub),
            Layout("clip4clip", {**LISTS, **DIDEMO}, {}),
            Layout("tmass", TMASS, {}),
            Layout(
                "official",
                DIDEMO,
                {},
                (),
                _didemo_from_official,
                "without CLIP4Clip's lists, all its videos are used",
            ),
        ),
        (
            Reading({"split": "lists"}, {"train": 8392, "val": 1065, "test": 1004}),
            Reading({"split": "hub"}, {"train": 8392, "test": 1004}),
            Reading({"split": "tmass"}, {"train": 8362, "val": 1062, "test": 1004}),
        ),
    ),
    "activitynet": Source(
        ActivityNet,
        (
            Layout(
                "hub", _hub("activitynet_captions", "train", "val1"), {}, (), _activitynet_from_hub
            ),
            Layout("official", _same("train.json", "val_1.json", "train_ids.json", "val_ids.json"), {}),
        ),
        (Reading({}, {"train": 10009, "test": 4917}),),
    ),
    "vatex": Source(
        VATEX,
        (
            Layout("hub", _hub("vatex", "train", "val", "test"), {}, (), _vatex_from_hub),
            Layout("hgr", {**LISTS, **_same("vatex_data.json")}, {}),
            Layout(
                "official",
                {**LISTS, **_same("vatex_training_v1.0.json", "vatex_validation_v1.0.json")},
                {},
                note="read them with data.init_args.annotations=official",
            ),
        ),
        (
            Reading({}, {"train": 25991, "val": 1500, "test": 1500}),
            Reading({"annotations": "official"}, {"train": 25991, "val": 1500, "test": 1500}),
        ),
    ),
    "lsmdc": Source(
        LSMDC,
        (
            Layout(
                "hub",
                {**_hub("lsmdc", "train", "val"), "test": r"lsmdc(_ret)?_test(_1000)?\.json"},
                {},
                (),
                _lsmdc_from_hub,
            ),
            Layout("official", _same(*LSMDC_FILES.values()), {}),
        ),
        (Reading({}, {"test": 1000}),),
    ),
    "charades": Source(
        Charades,
        (
            Layout(
                "official",
                _same("Charades_v1_train.csv", "Charades_v1_test.csv"),
                _same("charades_sta_train.txt", "charades_sta_test.txt"),
            ),
        ),
        (
            Reading({"split": "scripts"}, {"train": 7985, "test": 1863}),
            Reading({"split": "sta"}, {}),
        ),
    ),
}  # fmt: skip
"""Supported datasets for import, by folder name."""
