"""Files of external scores: reading, checks, and conversion to the order of a split."""

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow
import torch
from torch import Tensor

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.errors import UserError

NOT_FOUND = float("-inf")
"""Score of pairs that are missing in a table of pairs; they rank after all others."""


class ScoresError(UserError):
    """File of scores that cannot be read or does not fit its split."""

    exit_status = 2


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
        raise ScoresError(f"{path}: expected .npy, .npz, .pt or .parquet")
    if not path.is_file():
        raise ScoresError(f"{path}: no such file")
    try:
        if path.suffix in (".pt", ".pth"):
            found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            found = np.load(path, allow_pickle=False)
            found = dict(found) if path.suffix == ".npz" else found
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ScoresError(f"{path}: cannot be read ({reason}). Write the file again with plain arrays only.") from error
    entries: Mapping[str, Any] = found if isinstance(found, Mapping) else {"similarity": found}
    if len(entries) == 1:
        entries = {"similarity": next(iter(entries.values()))}
    if "similarity" not in entries:
        raise ScoresError(f"{path} contains {', '.join(sorted(map(str, entries)))}. Name the matrix 'similarity'.")
    matrix = entries["similarity"]
    matrix = torch.from_numpy(matrix) if isinstance(matrix, np.ndarray) and matrix.dtype.kind in "fiu" else matrix
    if not isinstance(matrix, Tensor) or matrix.ndim != 2 or not matrix.numel() or matrix.is_complex():
        raise ScoresError(f"{path}: expected a matrix of numbers with one row per text and one column per video")
    matrix = _finite(path, matrix if matrix.dtype == torch.float64 else matrix.float())
    names, index = entries.get("video_ids"), entries.get("text_index")
    if bank != "videos":
        matrix = _aligned(
            path, matrix, 1, None if names is None else [str(name) for name in names], video_ids, truth.where
        )
    if bank != "texts":
        rows = None if index is None else np.asarray(index).astype(np.int64).tolist()
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
            raise ScoresError(
                f"{path}: {count} {entry}s for the {len(expected)} {what}s of {where}. Write one {entry} per {what}."
            )
        return matrix
    if len(ids) != count:
        raise ScoresError(f"{path}: {len(ids)} {what} IDs for {count} {entry}s. Write one ID per {entry}.")
    index, wanted = pd.Index(ids), pd.Index(expected)
    problems = {
        f"is not in {where}. Use its {what} IDs, such as {expected[0]!r}.": index[~index.isin(wanted)],
        f"occurs twice. Write one {entry} per {what}.": index[index.duplicated()],
        f"of {where} is missing. Write one {entry} per {what}.": wanted[~wanted.isin(index)],
    }
    for problem, names in problems.items():
        if len(names):
            raise ScoresError(f"{path}: {what} {names.tolist()[0]!r} {problem}")
    return matrix.index_select(axis, torch.from_numpy(index.get_indexer(wanted)))


def _finite(path: Path, matrix: Tensor) -> Tensor:
    wrong = (~matrix.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ScoresError(
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
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ScoresError(
            f"{path}: not a parquet file with the columns text_index, video_id, and score ({error})"
        ) from error
    ids: dict[str, Sequence[Any]] = {"text_index": range(truth.texts), "video_id": video_ids}
    for column, known in ids.items():
        unknown = table[column][~table[column].isin(known)].tolist()
        if unknown:
            entry = f"{column.partition('_')[0]} {unknown[0]!r} is not in {truth.where}"
            raise ScoresError(f"{path}: {entry}. Use its values of {column}, such as {known[0]!r}.")
    twice = table[table.duplicated(["text_index", "video_id"])]
    if len(twice):
        text, video, _ = twice.iloc[0]
        raise ScoresError(f"{path}: text {text} with {video!r} occurs twice. Keep one of them.")
    _finite(path, torch.tensor(table["score"].to_numpy(), dtype=torch.float64)[None])
    matrix = table.pivot(index="text_index", columns="video_id", values="score")
    matrix = matrix.reindex(index=range(truth.texts), columns=list(video_ids)).fillna(NOT_FOUND)
    return torch.tensor(matrix.to_numpy(dtype=np.float64))
