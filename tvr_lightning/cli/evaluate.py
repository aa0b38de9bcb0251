"""`tvr evaluate`: the results table of any similarity matrix."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tvr_lightning.cli.loading import loading
from tvr_lightning.cli.types import File, Folder, NewFolder
from tvr_lightning.config.check import check_before_parsing, check_options, refusals, sources_of
from tvr_lightning.config.recipe_files import OptionError, refuse_options, split_options
from tvr_lightning.files import write_whole
from tvr_lightning.option_types import Count
from tvr_lightning.progress import shown

if TYPE_CHECKING:
    from tvr_lightning.data.ground_truth import GroundTruth
    from tvr_lightning.data.records import Split
    from tvr_lightning.evaluation.evaluator import Evaluation
    from tvr_lightning.evaluation.normalization import Normalizer
    from tvr_lightning.evaluation.statistics import Comparison


def evaluate(
    scores: list[File],
    /,
    data: str | None = None,
    config: list[str] = [],  # noqa: B006
    root: Folder | None = None,
    ids: File | None = None,
    normalization: str | None = None,
    bank_texts: File | None = None,
    bank_videos: File | None = None,
    recall: list[Count] = [],  # noqa: B006
    name: str | None = None,
    out: NewFolder = Path("runs"),
    overrides: Sequence[str] = (),
) -> int:
    """Rank a similarity matrix from any source on a dataset's test split, and optionally compare a second one with it.

    Args:
        scores: file with the scores of texts against videos: .npy, .npz, .pt, or parquet with one row per pair. If
            there are two files, the second is compared with the first.
        data: class of the dataset, such as MSRVTT; its test split defines the texts and videos and their order.
        config: data overlays instead of --data, for another split or protocol, can be repeated; later ones override
            earlier ones.
        root: parent folder of the dataset; TVR_DATA by default.
        ids: instead of a dataset, a CSV, JSON Lines, or parquet table with one row per text and the column video_id;
            the columns of the matrix are the videos in the order of their first appearance.
        normalization: class of the post-processing, such as DualSoftmax; --normalization.* sets its
            options.
        bank_texts: file with the scores of training texts (K, M) against the same videos, for some normalizations.
        bank_videos: file with the scores of the same texts against training videos (N, K), for some normalizations.
        recall: values of K for R@K, can be repeated; 1, 5, and 10 by default.
        name: name of the method in the results table; the file's name by default.
        out: parent folder of the results.
        overrides: options that override those of recipes.
    """
    if len(scores) > 2:
        raise OptionError(f"{len(scores)} files of scores were given. Give one, or two to compare.")
    if len(scores) == 2:
        refuse_options({"name": name}, "cannot be used with two files of scores, which keep their own names.")
    own = [f"--normalization={normalization}"] if normalization else []
    own += [option for option in overrides if option.startswith("--normalization.")]
    overrides = [option for option in overrides if option not in own]
    check_before_parsing([], own, [])
    with loading("evaluate"):
        from tvr_lightning.evaluation.external_scores import compare, evaluate_scores, intervals
        from tvr_lightning.evaluation.results import print_results, results_of, write_results
        from tvr_lightning.evaluation.scores_file import ScoresError, read_pairs, read_scores
        from tvr_lightning.evaluation.weights import Weights
        from tvr_lightning.runs.folder import create_run
    normalizer = _normalizer(own)
    if normalizer is None or not normalizer.needs_bank:
        banks_given = {"bank_texts": bank_texts, "bank_videos": bank_videos}
        refuse_options(banks_given, "can only be used with a normalization that needs a bank, such as QueryBankNorm.")
    if ids is not None:
        given = {"root": root, **dict(split_options(overrides))}
        refuse_options(given, "cannot be used with --ids, which reads no dataset.")
    truth, video_ids = _split_of(data, config, [*overrides, *([f"--data.init_args.root={root}"] if root else [])], ids)
    ks = tuple(sorted(set(recall or (1, 5, 10))))
    texts = read_scores(bank_texts, truth, video_ids, "texts") if bank_texts else None
    videos = read_scores(bank_videos, truth, video_ids, "videos") if bank_videos else None
    found: list[Evaluation] = []
    for path in scores:
        pairs = path.suffix == ".parquet"
        matrix = (read_pairs if pairs else read_scores)(path, truth, video_ids)
        try:
            with shown(f"evaluate: ranking {path.name}"):
                evaluation = evaluate_scores(matrix, truth, normalizer, ks, texts, videos)
                drawn = intervals(evaluation, truth, ks)
        except ValueError as error:
            raise ScoresError(f"{path}: {error}") from error
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
            results.intervals[direction] = {
                metric: {"low": ends.low, "high": ends.high} for metric, ends in row.items()
            }
        print_results(results)
        folder = create_run(out / f"{method}-{truth.dataset}".lower().replace(" ", "-"))
        json_path, csv_path = write_results(results, folder)
        print(f"Wrote {json_path} and {csv_path.name}")
        found.append(evaluation)
    if len(found) == 2:
        with shown("evaluate: comparing both"):
            comparison = compare(found[0], found[1], truth, ks)
        _report(comparison, scores, folder / "comparison.json")
    return 0


def _normalizer(options: Sequence[str]) -> Normalizer | None:
    """Build the post-processing of the scores."""
    from jsonargparse import ArgumentError, ArgumentParser

    from tvr_lightning.config.schema import generate
    from tvr_lightning.evaluation.normalization import Normalizer

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--normalization", type=Normalizer | None, default=None)
    try:
        return parser.instantiate(parser.parse_args(options)).normalization
    except ArgumentError as error:
        check_options(sources_of([], options), generate(parser))
        raise OptionError(refusals(str(error))) from error


def _split_of(
    data: str | None, config: list[str], overrides: Sequence[str], ids: Path | None
) -> tuple[GroundTruth, list[str]]:
    """Return the pairing of the test split, and the names of its videos."""
    from tvr_lightning.config.recipe import data_from_recipe
    from tvr_lightning.data.ground_truth import GroundTruth

    if (ids is not None) == bool(data or config):
        raise OptionError("Give either a dataset (--data MSRVTT or --config OVERLAY) or a table of IDs (--ids FILE).")
    if ids is not None:
        split = _split_of_ids(ids)
        title, warnings = ids.stem, []
    else:
        dataset = data_from_recipe(config, [*([f"--data={data}"] if data else []), *overrides])
        dataset.check_present("test", annotations_only=True)
        split, title, warnings = dataset.read_split("test"), dataset.full_title, dataset.warnings
    return GroundTruth.of(title, split, warnings), [video.video_id for video in split.videos]


def _split_of_ids(file: Path) -> Split:
    from tvr_lightning.data.caption_table import read_records
    from tvr_lightning.data.records import Split, TextRecord, VideoRecord, malformed

    places: dict[str, int] = {}
    texts = []
    for entry, record in read_records(file):
        if not str(record.get("video_id") or "").strip():
            raise malformed(file, entry, "no video_id", "add the ID of the text's video")
        texts.append(TextRecord("", places.setdefault(str(record["video_id"]).strip(), len(places))))
    if not texts:
        raise malformed(file, "whole file", "no rows", "write one row per text, with the column video_id")
    videos = [VideoRecord(video_id, file) for video_id in places]
    return Split("test", f"{len(texts)} texts and {len(videos)} videos of {file.name}", videos, texts)


def _report(comparison: dict[str, dict[str, Comparison]], scores: list[Path], file: Path) -> None:
    """Print and write how the second matrix differs from the first."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{scores[1].name} minus {scores[0].name}, 95 % intervals over queries, p of permutation tests")
    for column in ("direction", "metric", "difference", "interval", "p"):
        table.add_column(column, justify="left" if column in ("direction", "metric") else "right")
    for direction, row in comparison.items():
        for metric, found in row.items():
            ends = f"[{found.difference.low:+.1f}, {found.difference.high:+.1f}]"
            table.add_row(direction, metric, f"{found.difference.estimate:+.1f}", ends, f"{found.p_value:.4f}")
    Console().print(table)
    record = {direction: {name: asdict(found) for name, found in row.items()} for direction, row in comparison.items()}
    content = {"scores": [*map(str, scores)], "second_minus_first": record}
    write_whole(file, (json.dumps(content, indent=2) + "\n").encode())
    print(f"Wrote {file}")
