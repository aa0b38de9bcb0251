"""Questions about synthetic videos in the files of MSRVTT-QA, generated from `scenes.json`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tvr_lightning.synthetic.dataset_format import PARTS, write_json
from tvr_lightning.synthetic.scene import BACKDROP_COLOURS

FIGURE_QUESTIONS = 3  # per video, in addition to the two about its backdrop


def write_questions(folder: Path) -> list[Path]:
    """Write `train_qa.json`, `val_qa.json` and `test_qa.json` into the folder of a synthetic MSR-VTT.

    Each is a list of `{"id", "question", "answer", "category_id", "video_id"}` as in MSRVTT-QA, with numbers as video
    IDs and single words as answers. Every video has five questions: two about its backdrop, three about its figures
    and their motions. The words of a question reveal only the kind of answer.

    Args:
        folder: Folder of the dataset with `scenes.json`; equal scenes yield equal questions.

    Returns:
        Paths of the files.
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
    """Return five different questions about a scene.

    Args:
        scene: `scene.Scene` as in `scenes.json`.
        rng: Random generator that selects questions and wordings.

    Returns:
        Pairs of question and answer.
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
