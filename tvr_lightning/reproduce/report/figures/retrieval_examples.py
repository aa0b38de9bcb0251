"""Frames of videos: the best for some queries (TC-MGC, Figs. 9 and 14), failures, and questions (DPDV, Fig. S5)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import Trainer

from tvr_lightning.reproduce.report.drawing import Arrays, Chart, Image, frames
from tvr_lightning.reproduce.report.figures.encoded_split import STRIP_FRAMES, EncodedSplit, LoadedRun
from tvr_lightning.reproduce.report.sources import ReportedRun, read_ranks, undamaged
from tvr_lightning.runs.closing import PREDICTIONS

SHEET_QUERIES, SHEET_VIDEOS = 4, 3
MOST_FAILURES, FAILURE_FRAMES = 24, 2
MOST_LISTED = 2000  # failures of external scores
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


def measure_failures(encoded: EncodedSplit) -> dict[str, Any]:
    """Return frames of the best wrong video before post-processing, for queries whose own video is not ranked first.

    Queries are drawn in one order, the same for every run on a dataset, so that runs share them if both fail.
    """
    matching = encoded.matching
    rank = encoded.expected_ranks()
    others = encoded.similarity.clone()
    others[torch.arange(len(matching)), matching] = -torch.inf
    drawn = np.random.default_rng(0).permutation(len(rank))
    failed = [int(query) for query in drawn if rank[query] > 1 and others.shape[1] > 1][:MOST_FAILURES]
    right, wrong = matching[failed], others.argmax(dim=1)[failed]
    rows = torch.cat([right, wrong]).unique()
    strips = [encoded.strip(int(row), frames=FAILURE_FRAMES) for row in rows]
    videos = {"right": right, "wrong": wrong, "names": rows}
    return {
        "query": encoded.text_index[failed],
        "captions": np.array([encoded.caption(query) for query in failed], dtype=str),
        **{name: np.array([encoded.record(row).video_id for row in own], dtype=str) for name, own in videos.items()},
        "strips": np.stack(strips) if strips else np.zeros((0, FAILURE_FRAMES, 1, 1, 3), np.uint8),
    }


def failures_of_scores(run: ReportedRun) -> Arrays:
    """Return the same arrays for a run of external scores, which has no frames, from its predictions."""
    ranks, _ = read_ranks(run, "text_to_video")
    rank = ranks.expected()
    drawn = np.random.default_rng(0).permutation(len(rank))
    failed = ranks.index[[int(query) for query in drawn if rank[query] > 1][:MOST_LISTED]].tolist()
    predictions = run.ranks.with_name(PREDICTIONS)
    with undamaged(predictions, "or evaluate the scores again"):
        table = pd.read_parquet(predictions)
    others = table[table["video_id"] != table["correct_video_id"]].drop_duplicates("text_index").set_index("text_index")
    failed = [query for query in failed if query in others.index]
    columns = {"captions": "text", "right": "correct_video_id", "wrong": "video_id"}
    arrays = {name: others.loc[failed, column].to_numpy(dtype=str) for name, column in columns.items()}
    arrays |= {"query": np.array(failed, dtype=np.int64), "names": np.array([], dtype=str), "strips": np.array([])}
    return {f"failures.{name}": array for name, array in arrays.items()}


def comparisons(
    all_runs: Sequence[ReportedRun], arrays: Mapping[str, Arrays], save: Callable[[str, bytes], None]
) -> Iterator[dict[str, Any]]:
    """Yield the data for each group of at least two runs that ranked the same queries; frames are saved by name.

    `better[i][j]` counts the queries for which run i ranks the right video higher than run j; `failures` has for each
    run and drawn query the video that it found instead of the right one.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[ReportedRun]] = {}
    for run in all_runs:
        if run.ranks.is_file() and "failures.query" in arrays.get(run.key, {}):
            ranks, _ = read_ranks(run, "text_to_video")
            groups.setdefault((run.data, tuple(ranks.index.tolist())), []).append(run)
    compared = [(index, runs) for (_, index), runs in groups.items() if len(runs) > 1]
    for number, (index, runs) in enumerate(compared):
        place = {query: row for row, query in enumerate(index)}
        ranks_of = [read_ranks(run, "text_to_video")[0].expected() for run in runs]
        shown: dict[int, dict[str, Any]] = {}
        failures: list[dict[int, str]] = []
        videos: dict[str, str] = {}
        for run in runs:
            names = ("query", "captions", "right", "wrong", "names")
            query, captions, right, wrong, found = (arrays[run.key][f"failures.{name}"].tolist() for name in names)
            failures.append(dict(zip(query, wrong, strict=True)))
            for one, caption, video in zip(query, captions, right, strict=True):
                if one in place:  # else the runs omitted the text
                    expected = [float(own[place[one]]) for own in ranks_of]
                    shown[one] = {"caption": caption, "right": video, "ranks": expected}
            for name, strip in zip(found, arrays[run.key]["failures.strips"], strict=True):
                path = videos.setdefault(name, f"queries/{number}-{len(videos)}.jpg")
                save(path, frames(strip, "").content)
        better = [[int((own < other).sum()) for other in ranks_of] for own in ranks_of]
        yield {
            "title": runs[0].dataset, "runs": [run.title for run in runs], "better": better, "queries": len(index),
            "shown": shown, "failures": failures, "videos": videos,
        }  # fmt: skip


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
