"""Whether relevance tells queries that an index can answer from those that it cannot.

The index holds the held-out videos of a synthetic dataset that show neither stars nor rings. Thirty queries fit:
captions of the first of these videos in the test table. Thirty do not: the first fifteen captions of that table that
speak of stars or rings, which are no more than a shape away, and fifteen everyday sights that are not among the
sentences of the scale. The threshold is the package's own.

Command: python benchmarks/relevance.py --ckpt_path CHECKPOINT --synthetic FOLDER --work FOLDER
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import time
from pathlib import Path

from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.query import SearchQuery
from tvr_lightning.search.relevance import BACKGROUND, GOOD
from tvr_lightning.search.scorer import ScorerSource

ABSENT_SHAPES = {"star", "stars", "ring", "rings", "hoop", "hoops"}
EVERYDAY = (
    "a dog catches a frisbee",
    "a man plays the guitar on a stage",
    "two children run along the beach",
    "a woman cuts onions in a kitchen",
    "a car drives through a city at night",
    "a cat sleeps on a sofa",
    "a plane takes off from a runway",
    "a boy blows out candles on a cake",
    "a horse jumps over a fence",
    "a train arrives at a station",
    "men play chess in a park",
    "fireworks explode over a river",
    "a person types on a keyboard",
    "a tractor ploughs a field",
    "quarterly figures of the tax office",
)
EACH = 30


def shows_absent(captions: list[str]) -> bool:
    return any(ABSENT_SHAPES & set(caption.split()) for caption in captions)


def auc(fitting: list[float], absent: list[float]) -> float:
    """Probability that a fitting query gets more than an absent one; equal values count half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in fitting for b in absent)
    return wins / (len(fitting) * len(absent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt_path", required=True)
    parser.add_argument("--synthetic", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    folder = arguments.synthetic / "msrvtt"
    said: dict[str, list[str]] = {}
    for sentence in json.loads((folder / "MSRVTT_data.json").read_text())["sentences"]:
        said.setdefault(sentence["video_id"], []).append(sentence["caption"])
    with (folder / "MSRVTT_JSFUSION_test.csv").open(encoding="utf-8") as file:
        test = [(row["video_id"], row["sentence"]) for row in csv.DictReader(file)]
    shown = list(dict.fromkeys(video for video, _ in test if not shows_absent(said[video])))
    fitting = [caption for video, caption in test if video in shown][:EACH]
    near = [caption for _, caption in test if shows_absent([caption])][: EACH - len(EVERYDAY)]
    absent = [*near, *EVERYDAY]
    assert (len(fitting), len(absent)) == (EACH, EACH)
    assert not set(absent) & set(BACKGROUND)
    videos = [folder / "videos" / f"{video}.mp4" for video in shown]
    index(videos, arguments.work / "index", [ScorerSource(arguments.ckpt)], progress=False)
    with Searcher(arguments.work / "index") as searcher:

        def ask(queries: list[str]) -> list[float]:
            return [max(r.cosine for r in searcher.search(SearchQuery(query=query)).results) for query in queries]

        relevance = searcher.catalog.fact("relevance")
        found = {"fitting": ask(fitting), "absent, another shape": ask(near), "absent, everyday": ask(list(EVERYDAY))}
        asked = zip(found, (fitting, near, EVERYDAY), strict=True)
        weak = {name: [searcher.search(SearchQuery(query=query)).weak for query in queries] for name, queries in asked}
    print(f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}; {len(videos)} videos")
    print(f"scale: middle {relevance['middle']:.3f}, spread {relevance['spread']:.3f}; threshold {GOOD}\n")
    print("| queries | number | AUC against the fitting ones | nothing matches well |")
    print("|---|---|---|---|")
    for name, values in found.items():
        against = "" if name == "fitting" else f"{auc(found['fitting'], values):.3f}"
        print(f"| {name} | {len(values)} | {against} | {sum(weak[name])} |")
    both = found["absent, another shape"] + found["absent, everyday"]
    print(f"| absent, all | {len(both)} | {auc(found['fitting'], both):.3f} | |")


if __name__ == "__main__":
    main()
