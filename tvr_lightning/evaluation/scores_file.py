"""Files of scores: matrices and pairs from any source in the order of a split, and runs in TREC's format."""

import csv
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

from tvr_lightning.data.records import Split
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.matrix_layout import MatrixLayout
from tvr_lightning.files import replace_whole

NOT_FOUND = float("-inf")  # score of pairs that are missing in a table of pairs; they rank after all others
TREC_VIDEOS = 1000  # per text, as in the runs that are submitted to TREC
TREC_SUFFIXES = (".trec", ".run", ".txt")
TREC_CHUNK = 2**24  # scores that are sorted at a time
Bank = Literal["texts", "videos"]


def read_matrix(path: Path, layout: MatrixLayout, bank: Bank | None = None) -> Tensor:
    """Read scores (N, M) in the order of the split, without executing code from the file.

    `.npy` contains a matrix. `.npz` and `.pt` contain it alone or as `similarity`, with `video_ids` and
    `text_index` if rows and columns are not in the order of the layout. `.parquet` has the columns `text_index`,
    `video_id`, and `score`, as from `tvr predict`. `.trec`, `.run`, and `.txt` are runs of TREC. Pairs that these do
    not list score `NOT_FOUND`. If `bank` is `texts`, the rows are training texts; if it is `videos`, the columns are
    training videos: their order has no meaning and is kept.
    """
    if path.suffix == ".parquet" and bank is None:
        matrix = _matrix_of_pairs(path, _read_predictions(path), layout)
    elif path.suffix in TREC_SUFFIXES and bank is None:
        matrix = _matrix_of_pairs(path, _read_trec(path, layout), layout)
    else:
        matrix = _read_arrays(path, layout, bank)
    matrix = matrix if bank == "texts" else matrix[layout.rows]
    return matrix if bank == "videos" else matrix[:, layout.columns]


def _read_arrays(path: Path, layout: MatrixLayout, bank: Bank | None) -> Tensor:
    if path.suffix not in (".npy", ".npz", ".pt", ".pth"):
        others = "" if bank else f", .parquet, {', '.join(TREC_SUFFIXES)}"
        raise UserError(f"{path}: expected .npy, .npz, .pt{others}. Save the scores in such a file.")
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
        if isinstance(error, pickle.UnpicklingError):  # torch's message advises to run the code in the file
            reason = "it contains more than tensors, or is damaged"
        raise UserError(f"{path}: cannot be read ({reason}). Write the file again with plain arrays only.") from error
    entries: Mapping[str, Any] = found if isinstance(found, Mapping) else {"similarity": found}
    matrices = [name for name in entries if name not in ("video_ids", "text_index")]
    if "similarity" not in entries and len(matrices) != 1:
        raise UserError(f"{path} contains {', '.join(sorted(map(str, entries)))}. Name the matrix 'similarity'.")
    matrix = entries["similarity" if "similarity" in entries else matrices[0]]
    matrix = torch.from_numpy(matrix) if isinstance(matrix, np.ndarray) and matrix.dtype.kind in "fiu" else matrix
    dense = isinstance(matrix, Tensor) and matrix.layout == torch.strided and not matrix.is_complex()
    if not dense or matrix.ndim != 2 or not matrix.numel():
        found = f"{type(matrix).__name__} of shape {tuple(getattr(matrix, 'shape', ()))}"
        raise UserError(
            f"{path}: expected a dense matrix of numbers with one row per text and one column per video, found {found}"
        )
    matrix = _finite(path, matrix if matrix.dtype == torch.float32 else matrix.double())
    names, index = entries.get("video_ids"), entries.get("text_index")
    texts, videos = len(layout.rows), len(layout.columns)
    if matrix.shape == (videos, texts) != (texts, videos) and names is None and index is None and bank is None:
        raise UserError(
            f"{path} is transposed: its {videos} rows are the videos of {layout.where}, and its {texts} columns are "
            "the texts. Save it with texts in rows and videos in columns."
        )
    if bank != "videos":
        columns = None if names is None else [*map(str, np.ravel(names))]
        matrix = _aligned(path, matrix, 1, columns, layout.names, layout.where)
    if bank != "texts":
        if index is not None and np.asarray(index).dtype.kind not in "iu":
            raise UserError(f"{path}: text_index contains other values than whole numbers. Write the texts' indices.")
        rows = None if index is None else np.ravel(index).tolist()
        matrix = _aligned(path, matrix, 0, rows, range(texts), layout.where)
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
        f"is not in {where}. Use its {what} IDs, such as {expected[0]!r}.": ~index.isin(wanted),
        f"occurs twice. Write one {entry} per {what}.": index.duplicated(),
    }
    for problem, wrong in problems.items():
        if wrong.any():
            place = int(wrong.argmax())
            raise UserError(f"{path}: {entry} {place}: {what} {index.tolist()[place]!r} {problem}")
    if missing := wanted[~wanted.isin(index)].tolist():
        raise UserError(f"{path}: {what} {missing[0]!r} of {where} is missing. Write one {entry} per {what}.")
    return matrix.index_select(axis, torch.from_numpy(index.get_indexer(wanted)))


def _finite(path: Path, matrix: Tensor) -> Tensor:
    """Return a matrix of scores, or the scores of pairs, if all are finite."""
    wrong = (~matrix.isfinite()).nonzero()
    if len(wrong):
        place = ", column ".join(map(str, wrong[0].tolist()))
        raise UserError(
            f"{path}: {len(wrong)} of {matrix.numel()} scores are NaN or infinite, the first in row {place} (counted "
            "from 0). Fix the program that computed them."
        )
    return matrix


def _read_predictions(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_parquet(path, columns=["text_index", "video_id", "score"])
        return table.astype({"video_id": str})
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path}: not a parquet file with the columns text_index, video_id, and score ({error})"
        ) from error


def _read_trec(path: Path, layout: MatrixLayout) -> pd.DataFrame:
    """Return the lines `text Q0 video rank score tag` of a run; texts are named by their rows or IDs."""
    columns = ["text_index", "Q0", "video_id", "rank", "score", "tag", "more"]
    kinds = dict.fromkeys(columns, str) | {"score": float}
    missing = {"score": ["", "nan", "NaN"], "tag": [""], "more": [""]}  # texts and videos may be named null
    try:
        options: Any = {"quoting": csv.QUOTE_NONE, "keep_default_na": False, "na_values": missing}
        table: pd.DataFrame = pd.read_csv(path, sep=r"\s+", names=columns, dtype=kinds, **options)
        wrong = (table["tag"].isna() | table["more"].notna()).to_numpy()
        if wrong.any():
            raise ValueError(f"line {int(wrong.argmax()) + 1} does not have 6 fields")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a run in TREC's format, `text Q0 video rank score tag` ({error})") from error
    written = {_trec_name(name): name for name in layout.names}
    table["video_id"] = table["video_id"].map(lambda name: written.get(name, name))
    table["text_index"] = table["text_index"].map(lambda name: layout.keys.get(name, name))
    return table[["text_index", "video_id", "score"]]


def _matrix_of_pairs(path: Path, table: pd.DataFrame, layout: MatrixLayout) -> Tensor:
    """Return scores (N, M) float64 of pairs in the order of the layout."""
    if table["score"].dtype.kind not in "fiu":
        raise UserError(f"{path}: the column score contains other values than numbers. Write one number per pair.")
    ids: dict[str, list[Any]] = {"text_index": [*range(len(layout.rows))], "video_id": [*layout.names]}
    names = {"text_index": next(iter(layout.keys)), "video_id": layout.names[0]}
    for column, known in ids.items():
        unknown = ~table[column].isin(known)
        if unknown.any():
            row = int(unknown.to_numpy().argmax())
            entry = f"row {row}: {column.partition('_')[0]} {table[column].tolist()[row]!r} is not in {layout.where}"
            raise UserError(f"{path}: {entry}. Use its values of {column}, such as {names[column]}.")
    twice = table.duplicated(["text_index", "video_id"])
    if twice.any():
        row = int(twice.to_numpy().argmax())
        text, video, _ = table.iloc[row]
        raise UserError(f"{path}: row {row}: text {text} with {video!r} occurs twice. Keep one of them.")
    _finite(path, torch.tensor(table["score"].to_numpy(), dtype=torch.float64))
    matrix = table.pivot(index="text_index", columns="video_id", values="score")
    matrix = matrix.reindex(index=ids["text_index"], columns=ids["video_id"]).fillna(NOT_FOUND)
    return torch.tensor(matrix.to_numpy(dtype=np.float64))


def _trec_name(video: str) -> str:
    return re.sub(r"[\s%]", lambda match: quote(match[0]), video)


def write_trec(folder: Path, scores: Tensor, split: Split, tag: str) -> None:
    """Write the best 1,000 videos of every text to `run.trec`, and the correct video to `qrels.trec` (trec_eval).

    Scores are (N, M). Texts are named by their index in the split. Because spaces separate columns, white space (and %)
    in video IDs is percent-encoded, and in the `tag`, the name of the run, replaced by a hyphen. Pairs without a score
    are omitted.
    """
    names = [_trec_name(video.video_id) for video in split.videos]
    tag = re.sub(r"\s+", "-", tag)
    with replace_whole(folder / "run.trec") as run:
        for texts in torch.arange(len(scores)).split(max(TREC_CHUNK // len(names), 1)):
            best = scores[texts].topk(min(TREC_VIDEOS, len(names)))
            written = _single_precision(best.values)
            for text, values, columns in zip(texts.tolist(), written, best.indices, strict=True):
                ranked = enumerate(zip(values.tolist(), columns.tolist(), strict=True), start=1)
                lines = [
                    f"{text} Q0 {names[i]} {rank} {score} {tag}\n" for rank, (score, i) in ranked if score > NOT_FOUND
                ]
                run.write("".join(lines).encode())
    with replace_whole(folder / "qrels.trec") as qrels:
        for text, record in enumerate(split.texts):
            qrels.write(f"{text} 0 {names[record.video]} 1\n".encode())


def _single_precision(scores: Tensor) -> Tensor:
    """Return descending scores (N, k) in float32, in which trec_eval compares them, with the same order and ties.

    Scores that differ only in float64, such as the small probabilities of dual softmax, become successive numbers.
    """
    drops = torch.nn.functional.pad(scores.diff(dim=1) < 0, (1, 0)).long().cumsum(1)
    single = scores.float()
    places = single.sign().long() * single.abs().view(torch.int32)  # integers in the order of the float32 numbers
    places = (places + drops).cummin(1).values - drops
    return places.sign() * places.abs().int().view(torch.float32)
