"""Files of scores: matrices and pairs from any source in the order of a split, and runs in TREC's format."""

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow
import torch
from torch import Tensor

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.errors import UserError
from tvr_lightning.files import replace_whole

NOT_FOUND = float("-inf")  # score of pairs that are missing in a table of pairs; they rank after all others
TREC_VIDEOS = 1000  # per text, as in the runs that are submitted to TREC
TREC_CHUNK = 2**24  # scores that are sorted at a time


def read_scores(
    path: Path, truth: GroundTruth, video_ids: Sequence[str], bank: Literal["texts", "videos"] | None = None
) -> Tensor:
    """Read a similarity matrix (N, M) in the order of the split without executing code from the file.

    `.npy` contains the matrix. `.npz` and `.pt` contain it alone or under `similarity`, with `video_ids` and
    `text_index` if rows and columns are not in the split's order.

    Args:
        path: File of the scores.
        truth: Ground truth of the split's N texts and M videos.
        video_ids: IDs of the M videos.
        bank: `texts` if the rows are training texts, `videos` if the columns are training videos; their order has no
            meaning and is kept. None for scores (N, M) of the split itself.
    """
    if path.suffix not in (".npy", ".npz", ".pt", ".pth"):
        raise UserError(f"{path}: expected .npy, .npz, .pt or .parquet")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        if path.suffix in (".pt", ".pth"):
            found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            found = np.load(path, allow_pickle=False)
            found = dict(found) if path.suffix == ".npz" else found
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}). Write the file again with plain arrays only.") from error
    entries: Mapping[str, Any] = found if isinstance(found, Mapping) else {"similarity": found}
    if len(entries) == 1:
        entries = {"similarity": next(iter(entries.values()))}
    if "similarity" not in entries:
        raise UserError(f"{path} contains {', '.join(sorted(map(str, entries)))}. Name the matrix 'similarity'.")
    matrix = entries["similarity"]
    matrix = torch.from_numpy(matrix) if isinstance(matrix, np.ndarray) and matrix.dtype.kind in "fiu" else matrix
    dense = isinstance(matrix, Tensor) and matrix.layout == torch.strided and not matrix.is_complex()
    if not dense or matrix.ndim != 2 or not matrix.numel():
        raise UserError(f"{path}: expected a dense matrix of numbers with one row per text and one column per video")
    matrix = _finite(path, matrix if matrix.dtype == torch.float32 else matrix.double())
    names, index = entries.get("video_ids"), entries.get("text_index")
    if bank != "videos":
        columns = None if names is None else [*map(str, np.ravel(names))]
        matrix = _aligned(path, matrix, 1, columns, video_ids, truth.where)
    if bank != "texts":
        if index is not None and np.asarray(index).dtype.kind not in "iu":
            raise UserError(f"{path}: text_index contains other values than whole numbers. Write the texts' indices.")
        rows = None if index is None else np.ravel(index).tolist()
        matrix = _aligned(path, matrix, 0, rows, range(truth.texts), truth.where)
    return matrix


def _aligned(
    path: Path, matrix: Tensor, axis: int, ids: Sequence[Any] | None, expected: Sequence[Any], where: str
) -> Tensor:
    """Return the matrix with one axis in the order of the expected IDs; None if it has that order already."""
    what, entry = ("text", "row") if axis == 0 else ("video", "column")
    count = matrix.shape[axis]
    if ids is None:
        if count != len(expected):
            raise UserError(
                f"{path}: {count} {entry}s for the {len(expected)} {what}s of {where}. Write one {entry} per {what}."
            )
        return matrix
    if len(ids) != count:
        raise UserError(f"{path}: {len(ids)} {what} IDs for {count} {entry}s. Write one ID per {entry}.")
    index, wanted = pd.Index(ids), pd.Index(expected)
    problems = {
        f"is not in {where}. Use its {what} IDs, such as {expected[0]!r}.": index[~index.isin(wanted)],
        f"occurs twice. Write one {entry} per {what}.": index[index.duplicated()],
        f"of {where} is missing. Write one {entry} per {what}.": wanted[~wanted.isin(index)],
    }
    for problem, names in problems.items():
        if len(names):
            raise UserError(f"{path}: {what} {names.tolist()[0]!r} {problem}")
    return matrix.index_select(axis, torch.from_numpy(index.get_indexer(wanted)))


def _finite(path: Path, matrix: Tensor) -> Tensor:
    wrong = (~matrix.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise UserError(
            f"{path}: {len(wrong)} of {matrix.numel()} scores are NaN or infinite, the first in row {row}, column "
            f"{column} (counted from 0). Fix the program that computed them."
        )
    return matrix


def read_pairs(path: Path, truth: GroundTruth, video_ids: Sequence[str]) -> Tensor:
    """Read scores of pairs in the format of `tvr predict`: Parquet with columns text_index, video_id and score.

    Returns scores (N, M) float64 in the split's order; `NOT_FOUND` for pairs that are not listed.
    """
    try:
        table = pd.read_parquet(path, columns=["text_index", "video_id", "score"])
        table = table.astype({"video_id": str})
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path}: not a parquet file with the columns text_index, video_id, and score ({error})"
        ) from error
    if table["score"].dtype.kind not in "fiu":
        raise UserError(f"{path}: the column score contains other values than numbers. Write one number per pair.")
    ids: dict[str, Sequence[Any]] = {"text_index": range(truth.texts), "video_id": video_ids}
    for column, known in ids.items():
        unknown = table[column][~table[column].isin(known)].tolist()
        if unknown:
            entry = f"{column.partition('_')[0]} {unknown[0]!r} is not in {truth.where}"
            raise UserError(f"{path}: {entry}. Use its values of {column}, such as {known[0]!r}.")
    twice = table[table.duplicated(["text_index", "video_id"])]
    if len(twice):
        text, video, _ = twice.iloc[0]
        raise UserError(f"{path}: text {text} with {video!r} occurs twice. Keep one of them.")
    _finite(path, torch.tensor(table["score"].to_numpy(), dtype=torch.float64)[None])
    matrix = table.pivot(index="text_index", columns="video_id", values="score")
    matrix = matrix.reindex(index=range(truth.texts), columns=list(video_ids)).fillna(NOT_FOUND)
    return torch.tensor(matrix.to_numpy(dtype=np.float64))


def write_trec(folder: Path, scores: Tensor, truth: GroundTruth, video_ids: Sequence[str], tag: str) -> None:
    """Write the best 1,000 videos of every text to `run.trec`, and the correct video to `qrels.trec` (trec_eval).

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
        for texts in torch.arange(truth.texts).split(max(TREC_CHUNK // truth.videos, 1)):
            best = scores[texts].topk(min(TREC_VIDEOS, truth.videos))
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
