"""Questions about videos with the given and the correct answer (DPDV, Fig. S5)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from lightning.pytorch import Trainer

from tvr_lightning.methods import VideoQuestionAnswering
from tvr_lightning.reproduce.report.drawing import Arrays, Chart, frames
from tvr_lightning.reproduce.report.figures.encoded_split import STRIP_FRAMES, LoadedRun

EXAMPLES = 4


def applies(module: Any) -> bool:
    """Return whether a module answers questions."""
    return isinstance(module, VideoQuestionAnswering)


def measure_answers(encoded: LoadedRun) -> dict[str, Any]:
    """Answer the test questions, and return up to Q = 4, half of them answered correctly if possible.

    `question`, `answer`, `right`, `probability` (Q,) and `strips` (Q, F, S, S, 3), frames of their videos.
    """
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, devices=1)
    trainer.predict(encoded.module, datamodule=encoded.data, return_predictions=False)
    correct = [row for row in encoded.module.predictions if row["answer"] == row["right"]]
    wrong = [row for row in encoded.module.predictions if row["answer"] != row["right"]]
    shown = [*correct[: max(EXAMPLES // 2, EXAMPLES - len(wrong))], *wrong][:EXAMPLES]
    videos = {video.video_id: video for video in encoded.data.load_split("test").videos}
    strips = [encoded.clip(videos[row["video_id"]], STRIP_FRAMES).pixels.permute(0, 2, 3, 1) for row in shown]
    arrays = {name: [row[name] for row in shown] for name in ("question", "answer", "right", "probability")}
    return arrays | {"strips": np.stack(strips)}


def draw_answers(arrays: Arrays) -> Iterator[Chart]:
    """Return one chart per question with frames of its video and both answers."""
    for number, question in enumerate(arrays["question"]):
        answer, right = arrays["answer"][number], arrays["right"][number]
        caption = f"answer: {answer} (probability {arrays['probability'][number]:.2g}); correct: {right}"
        image = frames(arrays["strips"][number], "Frames of the video", caption, own=bool(answer == right))
        note = "DPDV, Fig. S5; videos of correctly answered questions have a green frame." if number == 0 else ""
        yield Chart(f"Question: “{question}”", [image], note=note)
