"""Questions about synthetic videos in the files of MSRVTT-QA."""

import random
from pathlib import Path
from typing import Any

from tvr_lightning.synthetic.formats import PARTS, Item, of_part, write_json
from tvr_lightning.synthetic.scene import BACKDROP_COLOURS, Scene

FIGURE_QUESTIONS = 3  # per video, in addition to the two about its backdrop


def write_questions(items: list[Item], seed: int, folder: Path) -> None:
    """Write `train_qa.json`, `val_qa.json` and `test_qa.json` into the folder of a synthetic MSR-VTT.

    As in MSRVTT-QA, video IDs are numbers and answers are single words. Every video has five questions: two about its
    backdrop, three about its figures and their motions. The words of a question reveal only the kind of answer.
    """
    number = 0
    for part in PARTS:
        entries: list[dict[str, Any]] = []
        for item in of_part(items, part):
            for question, answer in questions_of(item.scene, random.Random(f"{seed}/{item.video_id}")):
                entries.append(
                    {
                        "id": number,
                        "question": question,
                        "answer": answer,
                        "category_id": BACKDROP_COLOURS.index(item.scene.backdrop.colour),
                        "video_id": int(item.video_id.removeprefix("video")),
                    }
                )
                number += 1
        write_json(folder / f"{part}_qa.json", entries)


def questions_of(scene: Scene, rng: random.Random) -> list[tuple[str, str]]:
    """Return five different questions about a scene, with their answers."""
    first, last = scene.events[0], scene.events[-1]
    sure = [
        (("what color is the background", "what is the color behind the figures"), scene.backdrop.colour),
        (("what pattern does the background have", "how does the background look"), scene.backdrop.pattern),
    ]
    other = [
        (("what is the shape of the first figure", "what shape appears first"), first.figure.shape),
        (("what is the color of the first figure", "what color does the first figure have"), first.figure.colour),
        (("what is the shape of the last figure", "what shape appears last"), last.figure.shape),
        (("what is the color of the last figure", "what color does the last figure have"), last.figure.colour),
        (("what does the first figure do", "how does the first figure move"), first.motion),
        (("what does the last figure do", "how does the last figure move"), last.motion),
    ]
    asked = sure + rng.sample(other, FIGURE_QUESTIONS)
    return [(rng.choice(wordings), answer) for wordings, answer in asked]
