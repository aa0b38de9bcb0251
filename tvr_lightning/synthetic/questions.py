"""Questions about synthetic videos, in MSRVTT-QA's files, made from what `scenes.json` says of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tvr_lightning.synthetic.layouts import PARTS, write_json
from tvr_lightning.synthetic.scene import BACKDROP_COLOURS

FIGURE_QUESTIONS = 3  # of a video, besides the two about its backdrop


def write_questions(folder: Path) -> list[Path]:
    """Write `train_qa.json`, `val_qa.json` and `test_qa.json` beside the `scenes.json` of a synthetic MSR-VTT.

    Each is a list of `{"id", "question", "answer", "category_id", "video_id"}` as MSRVTT-QA has it: video ids are
    numbers, answers single words. Every video gets five questions: two about its backdrop, three about its figures and
    their motions. A question's words tell what kind of thing is asked for and no more.

    Args:
        folder: of the dataset; equal scenes give equal questions.

    Returns:
        The files.
    """
    truth = json.loads((folder / "scenes.json").read_text(encoding="utf-8"))
    paths, number = [], 0
    for part in PARTS:
        entries: list[dict[str, Any]] = []
        for video_id, video in truth["videos"].items():
            if video["part"] != part:
                continue
            for question, answer in questions_of(video["scene"], random.Random(f"{truth['seed']}/{video_id}")):
                entries.append(
                    {
                        "id": number,
                        "question": question,
                        "answer": answer,
                        "category_id": BACKDROP_COLOURS.index(video["scene"]["backdrop"]["colour"]),
                        "video_id": int(video_id.removeprefix("video")),
                    }
                )
                number += 1
        paths.append(folder / f"{part}_qa.json")
        write_json(paths[-1], entries)
    return paths


def questions_of(scene: dict[str, Any], rng: random.Random) -> list[tuple[str, str]]:
    """Ask five different questions about a scene.

    Args:
        scene: `scene.Scene` as `scenes.json` holds it.
        rng: draws wordings and which questions are asked.

    Returns:
        Question and answer of each.
    """
    backdrop, first, second = scene["backdrop"], scene["events"][0], scene["events"][-1]
    sure = [
        (("what color is the background", "what is the color behind the figures"), backdrop["colour"]),
        (("what pattern does the background have", "how does the background look"), backdrop["pattern"]),
    ]
    other = [
        (("what is the shape of the first figure", "what shape appears first"), first["figure"]["shape"]),
        (("what is the color of the first figure", "what color does the first figure have"), first["figure"]["colour"]),
        (("what is the shape of the last figure", "what shape appears last"), second["figure"]["shape"]),
        (("what is the color of the last figure", "what color does the last figure have"), second["figure"]["colour"]),
        (("what does the first figure do", "how does the first figure move"), first["motion"]),
        (("what does the last figure do", "how does the last figure move"), second["motion"]),
    ]
    asked = sure + rng.sample(other, FIGURE_QUESTIONS)
    return [(rng.choice(wordings), answer) for wordings, answer in asked]
