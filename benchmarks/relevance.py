"""Evaluation of relevance: how well it separates queries that match an index from those that do not.

The index contains the held-out videos of a synthetic dataset without stars or rings. Thirty queries match: captions of
the first of these videos in the test table. Thirty do not match: the first fifteen captions of that table that mention
stars or rings, and so differ only in one shape, and fifteen everyday scenes that are not among the sentences of the
scale. The threshold is the default of the package.

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


def auc(matching: list[float], absent: list[float]) -> float:
    """Return the probability that a matching query has a higher value than an absent one; ties count half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in matching for b in absent)
    return wins / (len(matching) * len(absent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt_path", required=True)
    parser.add_argument("--synthetic", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    folder = arguments.synthetic / "msrvtt"
    captions: dict[str, list[str]] = {}
    for sentence in json.loads((folder / "MSRVTT_data.json").read_text())["sentences"]:
        captions.setdefault(sentence["video_id"], []).append(sentence["caption"])
    with (folder / "MSRVTT_JSFUSION_test.csv").open(encoding="utf-8") as file:
        test = [(row["video_id"], row["sentence"]) for row in csv.DictReader(file)]
    shown = list(dict.fromkeys(video for video, _ in test if not shows_absent(captions[video])))
    matching = [caption for video, caption in test if video in shown][:EACH]
    near = [caption for _, caption in test if shows_absent([caption])][: EACH - len(EVERYDAY)]
    absent = [*near, *EVERYDAY]
    assert (len(matching), len(absent)) == (EACH, EACH)
    assert not set(absent) & set(BACKGROUND)
    videos = [folder / "videos" / f"{video}.mp4" for video in shown]
    index(videos, arguments.work / "index", [ScorerSource(arguments.ckpt_path)], progress=False)
    with Searcher(arguments.work / "index") as searcher:

        def ask(queries: list[str]) -> list[float]:
            return [max(r.cosine for r in searcher.search(SearchQuery(query=query)).results) for query in queries]

        relevance = searcher.table.fact("relevance")
        queries = {"matching": matching, "absent, another shape": near, "absent, everyday scenes": list(EVERYDAY)}
        found = {name: ask(group) for name, group in queries.items()}
        weak = {name: [searcher.search(SearchQuery(query=q)).weak for q in group] for name, group in queries.items()}
    print(f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}; {len(videos)} videos")
    print(f"scale: median {relevance['middle']:.3f}, spread {relevance['spread']:.3f}; threshold {GOOD}\n")
    print("| queries | number of queries | AUC against matching queries | weak answers |")
    print("|---|---|---|---|")
    for name, values in found.items():
        against = "" if name == "matching" else f"{auc(found['matching'], values):.3f}"
        print(f"| {name} | {len(values)} | {against} | {sum(weak[name])} |")
    both = found["absent, another shape"] + found["absent, everyday scenes"]
    print(f"| absent, all | {len(both)} | {auc(found['matching'], both):.3f} | |")


if __name__ == "__main__":
    main()
