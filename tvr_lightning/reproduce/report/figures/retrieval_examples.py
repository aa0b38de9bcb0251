"""Frames of videos: the best for some queries (TC-MGC, Figs. 9 and 14), and of questions (DPDV, Fig. S5)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer

from tvr_lightning.methods import VideoQuestionAnswering
from tvr_lightning.reproduce.report.drawing import Arrays, Chart, Image, frames
from tvr_lightning.reproduce.report.figures.encoded_split import STRIP_FRAMES, EncodedSplit, LoadedRun

SHEET_QUERIES, SHEET_VIDEOS = 4, 3
ANSWERS = 4


def measure_sheet(encoded: EncodedSplit) -> dict[str, Any]:
    """Return frames of the best videos for some queries, which are spread evenly over the ranks of the run.

    Arrays (Q, 1 + K, ...) have the own video first and then the K best before post-processing.
    """
    scores = encoded.similarity
    matching = encoded.matching
    rank = encoded.expected_ranks()
    places = np.linspace(0, len(rank) - 1, min(SHEET_QUERIES, len(rank))).round()
    queries = torch.argsort(rank, stable=True)[places.astype(int)]
    best = scores[queries].topk(min(SHEET_VIDEOS, scores.shape[1])).indices
    shown = torch.cat([matching[queries].unsqueeze(1), best], dim=1)
    strips = {video: encoded.strip(video) for video in shown.unique().tolist()}
    return {
        "captions": [encoded.caption(query) for query in queries],
        "names": np.array([[encoded.record(video).video_id for video in row] for row in shown], dtype=str),
        "score": scores[queries].gather(1, shown),
        "correct": shown == matching[queries].unsqueeze(1),
        "rank": rank[queries],
        "post_processing": encoded.post_processing or "",
        "strips": np.stack([[strips[video] for video in row] for row in shown.tolist()]),
    }


def draw_sheet(arrays: Arrays) -> Iterator[Chart]:
    """Return one chart per query with frames of its best videos; its own video has a green frame."""

    def clip(query: int, place: int, label: str) -> Image:
        own, name = bool(arrays["correct"][query, place]), arrays["names"][query, place]
        whose = "the query's own video" if own else "another video"
        caption = f"{label} {name}, score {arrays['score'][query, place]:.3f}"
        return frames(arrays["strips"][query, place], f"Frames of {name}, {whose}", caption, own)

    note = (
        "The query's own video has a green frame; queries are ordered from the best to the worst rank (TC-MGC, Figs. 9 "
        "and 14). Ranks are those of the run card; tied videos share a rank. "
    )
    if post_processing := str(arrays["post_processing"]):
        note += "The best videos and their scores are those before post-processing; ranks are those after "
    note += f"{post_processing}." if post_processing else "The run's scores are not post-processed."
    for query, caption in enumerate(arrays["captions"]):
        clips = [clip(query, place, f"{place}.") for place in range(1, arrays["names"].shape[1])]
        if not arrays["correct"][query, 1:].any():
            clips.append(clip(query, 0, "its own:"))
        facts = [f"its own video is ranked {arrays['rank'][query]:g}"]
        yield Chart(f"Retrieval sheet: “{caption}”", clips, facts, note if query == 0 else "")


def answers_questions(module: Any) -> bool:
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
    shown = [*correct[: max(ANSWERS // 2, ANSWERS - len(wrong))], *wrong][:ANSWERS]
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
