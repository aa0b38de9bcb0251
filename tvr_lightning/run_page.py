"""What a run's folder says of itself: `run.md` for people, and the rank of every query for further questions."""

from __future__ import annotations

import datetime
from pathlib import Path

import pandas as pd
from torch import Tensor

from tvr_lightning.data.records import Split
from tvr_lightning.evaluation.evaluator import Evaluation
from tvr_lightning.evaluation.results import Results, captions
from tvr_lightning.files import write_whole

PAGE, RANKS = "run.md", "ranks.parquet"
_FILES = {
    "results.json": "everything that was measured, on what, with which options; results.csv has the table alone",
    "config.yaml": "all options of the run, defaults included",
    "checkpoints": "last.ckpt after every epoch, best.ckpt by the score of the validation loop",
    "curves.csv": "what was logged: epoch, step, name, value; TensorBoard's events have the same",
    "log.txt": "what the run said",
    RANKS: "the rank of every query: direction, query, video, rank (expected where scores tie)",
    "predictions.parquet": "the best videos of every text, of tvr predict",
}


def write_run_page(folder: Path, results: Results, command: str) -> Path:
    """Write what a run was, what it gave and how to go on with it.

    Args:
        folder: of the run.
        results: its table.
        command: that made it.

    Returns:
        The page, markdown.
    """
    names = list(results.text_to_video)
    rows = [" | ".join([row["direction"], *(f"{row[name]:.1f}" for name in names)]) for row in results.rows()]
    trained = results.checkpoint is not None and Path(results.checkpoint).resolve().parent.parent == folder.resolve()
    lines = [
        f"# {results.method} on {results.dataset}",
        "",
        f"{results.protocol}. {datetime.date.today().isoformat()}, by this command:",
        "",
        *_code([command]),
        f"| direction | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(f"| {row} |" for row in rows),
        "",
        *(f"- {line}" for line in captions(results)),
        "",
        "## What lies here",
        "",
        *(f"- `{name}`: {what}" for name, what in _FILES.items() if (folder / name).exists()),
        "",
    ]
    if results.checkpoint is not None:
        checkpoint = results.checkpoint
        again = [f"{command} --checkpoints.resume=true   # after an interruption"] if trained else []
        below = ["What these write lies in `test/` and `predict/` below this folder.", ""] if trained else []
        lines += [
            "## How to go on",
            "",
            *below,
            *_code(
                [
                    f"tvr test --ckpt_path {checkpoint}",
                    f"tvr predict --ckpt_path {checkpoint}",
                    f"tvr index VIDEOS/ --out my-index --ckpt {checkpoint}",
                    *again,
                ]
            ),
        ]
    path = folder / PAGE
    write_whole(path, "\n".join(lines).encode())
    return path


def write_query_ranks(folder: Path, evaluation: Evaluation, split: Split, video_of_text: Tensor) -> Path:
    """Write the rank of every query of both directions.

    Args:
        folder: of the run.
        evaluation: of the split.
        split: which texts and videos were ranked.
        video_of_text: (N,) int64, place of each text's video.

    Returns:
        The parquet file: `direction`, `query` (a text, or a video's id), `video` (its match's id), `rank` from 1.
    """
    ids = [video.video_id for video in split.videos]
    texts, videos = evaluation.text_to_video_ranks, evaluation.video_to_text_ranks
    asked = texts.index.tolist()
    frames = [
        pd.DataFrame(
            {
                "direction": "text-to-video",
                "query": [split.texts[place].text for place in asked],
                "video": [ids[place] for place in video_of_text[texts.index.cpu()].tolist()],
                "rank": texts.expected().tolist(),
            }
        ),
        pd.DataFrame(
            {
                "direction": "video-to-text",
                "query": [ids[place] for place in videos.index.tolist()],
                "video": [ids[place] for place in videos.index.tolist()],
                "rank": videos.expected().tolist(),
            }
        ),
    ]
    path = folder / RANKS
    write_whole(path, pd.concat(frames, ignore_index=True).to_parquet(index=False))
    return path


def _code(lines: list[str]) -> list[str]:
    return ["```", *lines, "```", ""]
