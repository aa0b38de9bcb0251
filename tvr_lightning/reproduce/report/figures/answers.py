"""Questions about videos with the given and the correct answer (DPDV, Fig. S5)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning.pytorch import Trainer

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.media.video import DecodedClip, read_clip
from tvr_lightning.methods import VideoQuestionAnswering
from tvr_lightning.reproduce.report.drawing import Arrays, Chart, frames

EXAMPLES = 4
FRAMES, SIZE = 4, 72


@dataclass
class AnsweredSplit:
    """A run's test questions as its weights answer them: `rows` as of `VideoQuestionAnswering.predictions`."""

    module: VideoQuestionAnswering
    data: TextVideoDataModule
    rows: list[dict[str, Any]]


def sampled_clip(data: TextVideoDataModule, video: VideoRecord, frames: int, size: int) -> DecodedClip:
    """Return frames of a video, sampled as the method does; padded ones are black."""
    return read_clip(video.path, frames=frames, image_size=size, sampling=data.sampling, span=video.span)


def applies(module: Any) -> bool:
    """Return whether a module answers questions."""
    return isinstance(module, VideoQuestionAnswering)


def answer_test_split(module: VideoQuestionAnswering, data: TextVideoDataModule) -> AnsweredSplit:
    """Answer the questions of the test split."""
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, devices=1)
    trainer.predict(module, datamodule=data, return_predictions=False)
    return AnsweredSplit(module, data, module.predictions or [])


def measure_answers(answered: AnsweredSplit) -> dict[str, Any]:
    """Return up to Q = 4 questions, half of them answered correctly if possible, with frames of their videos.

    `question`, `answer`, `right`, `probability` (Q,) and `strips` (Q, F, S, S, 3).
    """
    correct = [row for row in answered.rows if row["answer"] == row["right"]]
    wrong = [row for row in answered.rows if row["answer"] != row["right"]]
    half = max(EXAMPLES // 2, EXAMPLES - len(wrong))
    shown = [*correct[:half], *wrong][:EXAMPLES]
    videos = {video.video_id: video for video in answered.data.load_split("test").videos}
    clips = [sampled_clip(answered.data, videos[row["video_id"]], FRAMES, SIZE) for row in shown]
    fields = {name: [row[name] for row in shown] for name in ("question", "answer", "right", "probability")}
    return {**fields, "strips": np.stack([clip.pixels.permute(0, 2, 3, 1).numpy() for clip in clips])}


def draw_answers(arrays: Arrays) -> Iterator[Chart]:
    """Return one chart per question with frames of its video and both answers."""
    for number, question in enumerate(arrays["question"]):
        answer, right = arrays["answer"][number], arrays["right"][number]
        caption = f"answer: {answer} (probability {arrays['probability'][number]:.2g}); correct: {right}"
        image = frames(arrays["strips"][number], "Frames of the video", caption, own=bool(answer == right))
        note = "DPDV, Fig. S5; videos of correctly answered questions have a green frame." if number == 0 else ""
        yield Chart(f"Question: “{question}”", [image], note=note)
