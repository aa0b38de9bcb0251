"""Reranking of the candidates of an evaluation: each pair is scored once, and scores survive a killed process."""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from tvr_lightning.data.records import VideoRecord
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.reranker import Reranker
from tvr_lightning.files import Journal, read_journal
from tvr_lightning.progress import clock, progress_bar


@dataclass
class RerankedPairs:
    """Scores (P,) of pairs by their ascending keys (P,), and the mean time of a pair in seconds."""

    keys: Tensor
    scores: Tensor
    seconds: float

    def of(self, keys: Tensor) -> Tensor:
        """Return the scores of some of the pairs, in the shape of their keys."""
        return self.scores[torch.searchsorted(self.keys, keys)]


def rerank(reranker: Reranker, source: PairScores, keys: Tensor, folder: Path) -> RerankedPairs:
    """Score pairs of captions and video files, one video after the other, and store the scores of each video.

    Texts and videos of the source are in random orders, so that positions reveal nothing.

    Raises:
        UserError: There are no captions or files, or the reranker does not accept them.
    """
    captions, files, shard = source.captions, source.files, source.shard
    if not files:
        raise UserError("Reranking needs captions and video files, which only this project's data modules provide.")
    pairs: dict[int, list[int]] = {}
    for key in keys.tolist():
        pairs.setdefault(key // source.queries, []).append(key % source.queries)
    absent = [str(files[video].path) for video in pairs if not files[video].path.is_file()]
    if absent:
        raise UserError(f"Reranking needs {len(absent)} video files that are missing, such as {absent[0]}. Add them.")
    if not reranker.takes_spans and any(files[video].span for video in pairs):
        raise UserError(
            f"The reranker {reranker.name} scores whole files, but videos of this dataset are parts of files."
        )
    settings = reranker.settings()
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    stored: dict[str, dict[str, float]] = {}
    times = {}

    def add(entry: Any) -> None:
        stored.setdefault(entry["video"], {}).update(entry["scores"])
        times[entry["video"]] = entry["seconds"] / len(entry["scores"])

    mine = [video for video in pairs if video % shard.world == shard.rank]
    name = f"{digest}-{shard.rank}.jsonl"
    with (
        Journal.open(folder / name, settings, f"the reranked scores {folder / name}") as journal,
        progress_bar(shard.rank == 0) as bar,
    ):
        for other in sorted(folder.glob(f"{digest}-*.jsonl")):  # also of runs with more processes
            for entry in read_journal(other)[0][1:]:
                add(entry)
        known = [_identity(files[video]) for video in mine]
        missing = []
        for video, key in zip(mine, known, strict=True):
            wanted = dict.fromkeys(captions[text] for text in pairs[video])
            missing.append((files[video], key, [caption for caption in wanted if caption not in stored.get(key, {})]))
        missing = [job for job in missing if job[2]]
        left = sum(len(asked) for _, _, asked in missing)
        if left:
            reranker.load()
            record, key, asked = missing[0]
            missing[:1] = [(record, key, part) for part in (asked[:1], asked[1:]) if part]  # to time the first pair
        task = bar.add_task(f"reranking by {reranker.name}", total=left, visible=left > 0)
        for number, (record, key, asked) in enumerate(missing):
            start = time.monotonic()
            scores = reranker.checked(asked, record.path, record.span)
            seconds = time.monotonic() - start
            if number == 0:
                rank_zero_info(
                    f"Reranking {left} pairs takes at most about {clock(left * seconds)}, at {seconds:.3g} s for the "
                    f"first; scores are stored in {folder}."
                )
            journal.append({"video": key, "scores": dict(zip(asked, scores, strict=True)), "seconds": seconds})
            add(journal.entries[-1])
            bar.advance(task, len(asked))
    found = torch.zeros(len(keys), dtype=torch.float64)
    place = {key: number for number, key in enumerate(keys.tolist())}
    for video, key in zip(mine, known, strict=True):
        for text in pairs[video]:
            found[place[video * source.queries + text]] = stored[key][captions[text]]
    mean = torch.tensor([sum(times[key] for key in known), len(known)], dtype=torch.float64)
    found, mean = (shard.sum(each.to(source.device)).cpu() for each in (found, mean))
    return RerankedPairs(keys, found, float(mean[0] / mean[1]))


def _identity(video: VideoRecord) -> str:
    """Return the path, size, and time of change of a file with the span, which identify stored scores."""
    status = video.path.stat()
    return json.dumps([str(video.path.resolve()), status.st_size, status.st_mtime_ns, video.span])
