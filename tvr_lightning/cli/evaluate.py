"""`tvr evaluate`: the results table of any similarity matrix."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tvr_lightning.cli.options import Config, File, NewFolder
from tvr_lightning.config.recipe_files import refuse_options, split_options
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Count
from tvr_lightning.runs.log import loading

if TYPE_CHECKING:
    from tvr_lightning.data.ground_truth import GroundTruth
    from tvr_lightning.evaluation.evaluator import Evaluation
    from tvr_lightning.evaluation.normalization import Normalizer
    from tvr_lightning.evaluation.statistics import Comparison


def evaluate(
    scores: Annotated[list[File], ".npy, .npz, or .pt file, or a .parquet file with one row per pair"],
    /,
    config: Config = [],
    ids: Annotated[File | None, "CSV, JSON Lines, or parquet table of the texts' videos, instead of a dataset"] = None,
    bank_texts: Annotated[File | None, "scores of training texts (K, M) against the same videos"] = None,
    bank_videos: Annotated[File | None, "scores of the same texts against training videos (N, K)"] = None,
    recall: Annotated[list[Count], "K of R@K; 1, 5, and 10 by default"] = [],
    metrics: Annotated[list[Literal["ndcg@10", "mrr"]], "further metric of both directions, in percent"] = [],
    trec: Annotated[bool, "also write run.trec and qrels.trec (text-to-video), for trec_eval and ir_measures"] = False,
    name: Annotated[str | None, "name of the method in the results table; the file's name by default"] = None,
    out: Annotated[NewFolder, "parent folder of the results"] = Path("runs"),
    overrides: Sequence[str] = (),
) -> None:
    """Rank a similarity matrix from any source, and print and save the results.

    A second matrix is compared with the first. Rows are the texts and columns the videos of a dataset's test split:
    --data CLASS, such as MSRVTT, or --config OVERLAY for another split or protocol. --ids FILE replaces the dataset:
    it has a row per text and the column video_id, and the videos are in the order of their first appearance.
    --normalization CLASS, such as DualSoftmax, is applied to the scores; some need a bank of training scores.
    """
    of_normalization = [option for option in overrides if option.startswith("--normalization")]
    of_data = [option for option in overrides if option not in of_normalization]
    if len(scores) > 2:
        raise UserError(f"{len(scores)} files of scores were given. Give one, or two to compare.")
    if name is not None and Path(name).name != name:
        raise UserError(f"--name is {name}; expected a name without slashes, which becomes part of a folder's name.")
    if len(scores) == 2:
        refuse_options({"name": name}, "cannot be used with two files of scores, which keep their own names.")
    if ids is not None:
        given = {"config": config or None, **dict(split_options(of_data))}
        refuse_options(given, "cannot be used with --ids, which reads no dataset.")
    elif not config and not of_data:
        raise UserError("Give either a dataset (--data MSRVTT or --config OVERLAY) or a table of IDs (--ids FILE).")
    with loading("evaluate"):
        from tvr_lightning.evaluation.external_scores import compare, evaluate_scores, intervals
        from tvr_lightning.evaluation.results import print_results, results_of, write_results
        from tvr_lightning.evaluation.scores_file import read_pairs, read_scores, write_trec
        from tvr_lightning.evaluation.sources import complete_matrix
        from tvr_lightning.evaluation.weights import Weights
        from tvr_lightning.metrics import MRR, NDCG
        from tvr_lightning.progress import shown
        from tvr_lightning.runs.folder import create_run
    normalizer = _normalizer(of_normalization)
    if normalizer is None or not normalizer.needs_bank:
        banks = {"bank_texts": bank_texts, "bank_videos": bank_videos}
        refuse_options(banks, "can only be used with a normalization that needs a bank, such as QueryBankNorm.")
    truth, video_ids = _truth_of_dataset(config, of_data) if ids is None else _truth_of_ids(ids)
    ks = tuple(sorted(set(recall or (1, 5, 10))))
    more = [MRR() if metric == "mrr" else NDCG(10) for metric in dict.fromkeys(metrics)]
    texts = read_scores(bank_texts, truth, video_ids, "texts") if bank_texts else None
    videos = read_scores(bank_videos, truth, video_ids, "videos") if bank_videos else None
    found: list[Evaluation] = []
    for path in scores:
        matrix = (read_pairs if path.suffix == ".parquet" else read_scores)(path, truth, video_ids)
        try:
            with shown(f"evaluate: ranking {path.name}"):
                evaluation, ranked = evaluate_scores(matrix, truth, normalizer, ks, texts, videos, more)
                drawn = intervals(evaluation, truth, ks, more)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error
        method = name or path.stem
        results = results_of(
            evaluation,
            method=method,
            select_on=None,
            checkpoint=None,
            skipped=[],
            config={"scores": str(path.resolve()), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
            precision=str(matrix.dtype).removeprefix("torch."),
            seed=None,
            weights=Weights("outside", start=str(path)),
        )
        for direction, row in drawn.items():
            results.intervals[direction] = {metric: {"low": i.low, "high": i.high} for metric, i in row.items()}
        print_results(results)
        folder = create_run(out / f"{method}-{truth.dataset}".lower().replace(" ", "-"))
        json_path, csv_path = write_results(results, folder)
        print(f"Wrote {json_path} and {csv_path.name}")
        if trec:
            with shown("evaluate: writing run.trec"):
                write_trec(folder, complete_matrix(ranked), truth, video_ids, method)
            print(f"Wrote {folder / 'run.trec'} and qrels.trec")
        found.append(evaluation)
    if len(found) == 2:
        with shown("evaluate: comparing both"):
            comparison = compare(found[0], found[1], truth, ks, more)
        _report(comparison, scores, folder / "comparison.json")


def _normalizer(options: Sequence[str]) -> Normalizer | None:
    from jsonargparse import ArgumentError, ArgumentParser

    from tvr_lightning.config.check import check_options, refusals, sources_of
    from tvr_lightning.config.schema import generate
    from tvr_lightning.evaluation.normalization import Normalizer

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--normalization", type=Normalizer | None, default=None)
    try:
        return parser.instantiate(parser.parse_args(options)).normalization
    except ArgumentError as error:
        check_options(sources_of([], options), generate(parser))
        raise UserError(refusals(str(error))) from error


def _truth_of_dataset(config: list[str], overrides: Sequence[str]) -> tuple[GroundTruth, list[str]]:
    """Return the ground truth of a dataset's test split and the IDs of its videos, whose files may be missing."""
    from tvr_lightning.config.recipe import data_from_recipe

    dataset = data_from_recipe(config, overrides)
    dataset.check_present("test", annotations_only=True)
    return dataset.ground_truth("test"), [video.video_id for video in dataset.read_split("test").videos]


def _truth_of_ids(file: Path) -> tuple[GroundTruth, list[str]]:
    """Return the ground truth and the video IDs of a table with the column video_id and one row per text."""
    import torch

    from tvr_lightning.data.ground_truth import GroundTruth
    from tvr_lightning.data.records import malformed, read_records

    places: dict[str, int] = {}
    matches = []
    for entry, record in read_records(file):
        given = record.get("video_id")
        video = "" if given is None else str(given).strip()
        if not video:
            raise malformed(file, entry, "no video_id", "add the ID of the text's video")
        matches.append(places.setdefault(video, len(places)))
    if not matches:
        raise malformed(file, "whole file", "no rows", "write one row per text, with the column video_id")
    protocol = f"{len(matches)} texts and {len(places)} videos of {file.name}"
    truth = GroundTruth(torch.tensor(matches), len(places), file.stem, "test", protocol, where=file.name)
    return truth, list(places)


def _report(comparison: dict[str, dict[str, Comparison]], scores: list[Path], file: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from tvr_lightning.files import write_whole

    title = f"{scores[1].name} minus {scores[0].name}, 95 % intervals over queries, p of permutation tests"
    table = Table("direction", "metric", "difference", "interval", "p", title=title)
    for direction, row in comparison.items():
        for metric, found in row.items():
            ends = f"[{found.difference.low:+.1f}, {found.difference.high:+.1f}]"
            table.add_row(direction, metric, f"{found.difference.estimate:+.1f}", ends, f"{found.p_value:.4f}")
    Console().print(table)
    record = {direction: {name: asdict(found) for name, found in row.items()} for direction, row in comparison.items()}
    content = {"scores": [*map(str, scores)], "second_minus_first": record}
    write_whole(file, (json.dumps(content, indent=2) + "\n").encode())
    print(f"Wrote {file}")
