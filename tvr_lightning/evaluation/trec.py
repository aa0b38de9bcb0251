"""Results of text-to-video as files of TREC's format, for trec_eval, pytrec_eval, ir_measures and ranx."""

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.scores_file import NOT_FOUND
from tvr_lightning.files import replace_whole

VIDEOS = 1000  # per text, as in the runs that are submitted to TREC
CHUNK = 2**24  # scores that are sorted at a time


def write_trec(folder: Path, scores: Tensor, truth: GroundTruth, video_ids: Sequence[str], tag: str) -> None:
    """Write the best 1,000 videos of every text to `run.trec`, and the correct video to `qrels.trec`.

    Texts are named by their index in the split. Because spaces separate columns, white space (and %) in video IDs is
    percent-encoded. Pairs without a score are omitted.

    Args:
        folder: Existing folder.
        scores: Scores (N, M) of the split's texts against its videos.
        truth: Ground truth of the split.
        video_ids: IDs of the M videos.
        tag: Name of the run, in which white space is replaced by a hyphen.
    """
    names = [re.sub(r"[\s%]", lambda match: quote(match[0]), video) for video in video_ids]
    tag = re.sub(r"\s+", "-", tag)
    with replace_whole(folder / "run.trec") as run:
        for texts in torch.arange(truth.texts).split(max(CHUNK // truth.videos, 1)):
            best = scores[texts].topk(min(VIDEOS, truth.videos))
            written = _single_precision(best.values)
            for text, values, columns in zip(texts.tolist(), written, best.indices, strict=True):
                ranked = enumerate(zip(values.tolist(), columns.tolist(), strict=True), start=1)
                lines = [
                    f"{text} Q0 {names[i]} {rank} {score} {tag}\n" for rank, (score, i) in ranked if score > NOT_FOUND
                ]
                run.write("".join(lines).encode())
    with replace_whole(folder / "qrels.trec") as qrels:
        for text, video in enumerate(truth.video_of_text.tolist()):
            qrels.write(f"{text} 0 {names[video]} 1\n".encode())


def _single_precision(scores: Tensor) -> Tensor:
    """Return descending scores (N, k) in float32, in which trec_eval compares them, with the same order and ties.

    Scores that differ only in float64, such as the small probabilities of dual softmax, become successive numbers.
    """
    drops = torch.nn.functional.pad(scores.diff(dim=1) < 0, (1, 0)).long().cumsum(1)
    single = scores.float()
    places = single.sign().long() * single.abs().view(torch.int32)  # integers in the order of the float32 numbers
    places = (places + drops).cummin(1).values - drops
    return places.sign() * places.abs().int().view(torch.float32)
