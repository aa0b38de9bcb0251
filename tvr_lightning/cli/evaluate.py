"""`tvr evaluate`: tables of the similarity matrices of any systems."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tvr_lightning.cli.options import Config, File, NewFolder
from tvr_lightning.config.recipe_files import recipes_folder, refuse_options
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Count
from tvr_lightning.runs.log import loading

if TYPE_CHECKING:
    from tvr_lightning.data.ground_truth import GroundTruth
    from tvr_lightning.evaluation.matrix_layout import MatrixLayout
    from tvr_lightning.evaluation.normalization import Normalizer


def evaluate(
    scores: Annotated[list[File], ".npy, .npz, .pt, .parquet (a row per pair), or .trec file of each system"],
    /,
    config: Config = [],
    ids: Annotated[File | None, "CSV, JSON Lines, or parquet table of the matrices' rows, in their order"] = None,
    bank_texts: Annotated[File | None, "scores of training texts (K, M) against the same videos"] = None,
    bank_videos: Annotated[File | None, "scores of the same texts against training videos (N, K)"] = None,
    bank: Annotated[Literal["half"] | None, "half: rank each half of the queries with the other as bank"] = None,
    recall: Annotated[list[Count], "K of R@K; 1, 5, and 10 by default"] = [],
    metrics: Annotated[list[Literal["ndcg@10", "mrr"]], "further metric of both directions, in percent"] = [],
    published: Annotated[list[str], "published table whose rows are shown as well, such as gare-1"] = [],
    trec: Annotated[bool, "also write run.trec and qrels.trec (text-to-video), for trec_eval and ir_measures"] = False,
    name: Annotated[str | None, "name of the method in the results table; the file's name by default"] = None,
    out: Annotated[NewFolder, "folder of the results and the report"] = Path("runs/evaluated"),
    overrides: Sequence[str] = (),
) -> None:
    """Rank the score matrices of any systems, and compare the systems in tables and pages.

    Rows are the texts and columns the videos of a dataset's test split: --data CLASS, such as MSRVTT, or --config
    OVERLAY for another split or protocol. --ids FILE has a row per text, with the columns video_id and sentence, for
    matrices in another order, or without a dataset; videos are in the order of their first appearance.
    --normalization CLASS, such as DualSoftmax, is applied to the scores; some need a bank of training scores.
    """
    of_normalization = [option for option in overrides if option.startswith("--normalization")]
    of_data = [option for option in overrides if option not in of_normalization]
    if name is not None and Path(name).name != name:
        raise UserError(f"--name is {name}; expected a name without slashes, which becomes part of a folder's name.")
    if len(scores) > 1:
        refuse_options({"name": name}, "cannot be used with several files of scores, which keep their own names.")
    names = [name or path.stem for path in scores]
    if repeated := [each for each in names if names.count(each) > 1]:
        raise UserError(f"Two files of scores are named {repeated[0]}. Rename one, since the tables show these names.")
    if ids is None and not config and not of_data:
        raise UserError("Give either a dataset (--data MSRVTT or --config OVERLAY) or a table of IDs (--ids FILE).")
    with loading("evaluate"):
        import torch

        from tvr_lightning.evaluation.external_scores import evaluate_scores
        from tvr_lightning.evaluation.normalization import HalfBank
        from tvr_lightning.evaluation.results import print_results, results_of, write_predictions, write_results
        from tvr_lightning.evaluation.scores_file import read_matrix, write_trec
        from tvr_lightning.evaluation.sources import MatrixSource, best_of_gallery, complete_matrix
        from tvr_lightning.evaluation.weights import Weights
        from tvr_lightning.metrics import MRR, NDCG
        from tvr_lightning.progress import shown
        from tvr_lightning.reproduce.report.site import report_on
        from tvr_lightning.reproduce.report.sources import run_of_results
        from tvr_lightning.reproduce.report.systems import print_differences
        from tvr_lightning.reproduce.tables import load_table
        from tvr_lightning.runs.closing import PREDICTIONS, write_query_ranks
        from tvr_lightning.runs.folder import create_run
    recipes = recipes_folder(Path("recipes"))
    for table in published:
        load_table(table, recipes)
    normalizer = _normalizer(of_normalization) if of_normalization else None
    given = {"bank_texts": bank_texts, "bank_videos": bank_videos}
    if normalizer is None or not (normalizer.needs_bank or normalizer.accepts_bank):
        refuse_options(
            {**given, "bank": bank}, "can only be used with a normalization that uses a bank, such as QueryBankNorm."
        )
    if bank is not None:
        refuse_options(given, "cannot be used with --bank half.")
    truth, layout = _test_set(config, of_data, ids)
    if bank is not None and normalizer is not None:
        normalizer = HalfBank(normalizer, truth.video_of_text, truth.videos)
    ks = tuple(sorted(set(recall or (1, 5, 10))))
    more = [MRR() if metric == "mrr" else NDCG(10) for metric in dict.fromkeys(metrics)]
    texts = read_matrix(bank_texts, layout, "texts") if bank_texts else None
    videos = read_matrix(bank_videos, layout, "videos") if bank_videos else None
    runs = []
    for method, path in zip(names, scores, strict=True):
        matrix = read_matrix(path, layout)
        try:
            with shown(f"evaluate: ranking {path.name}"):
                evaluation, ranked = evaluate_scores(matrix, truth, normalizer, ks, texts, videos, more)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error
        evaluation.partial |= layout.left_out > 0
        content = {"scores": str(path.resolve()), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        results = results_of(
            evaluation,
            method=method,
            select_on=None,
            checkpoint=None,
            skipped=[],
            config=content | {"published": published},
            precision=str(matrix.dtype).removeprefix("torch."),
            seed=None,
            weights=Weights("outside", start=str(path)),
        )
        print_results(results)
        folder = create_run(out / f"{method}-{truth.dataset}".lower().replace(" ", "-"))
        json_path, csv_path = write_results(results, folder)
        write_query_ranks(folder, evaluation, layout.split, truth.video_of_text)
        best = best_of_gallery(MatrixSource(matrix), 2)
        write_predictions(folder / PREDICTIONS, layout.split, torch.arange(len(matrix)), *best)
        print(f"Wrote {json_path} and {csv_path.name}")
        if trec:
            with shown("evaluate: writing run.trec"):
                write_trec(folder, complete_matrix(ranked), layout.split, method)
            print(f"Wrote {folder / 'run.trec'} and qrels.trec")
        runs += [run for run in [run_of_results(json_path, out)] if run]
    site = report_on(runs, out, recipes)
    if len(runs) > 1:
        print_differences(site.views[0])
    for path in site.write():
        print(f"Wrote {path}")


def _normalizer(options: Sequence[str]) -> Normalizer | None:
    from tvr_lightning.config.check import NORMALIZATION, build, merge, sources_of
    from tvr_lightning.config.recipe import recipe_schema
    from tvr_lightning.evaluation.normalization import Normalizer

    schema = recipe_schema()
    schema["properties"] = NORMALIZATION
    normalizer: Normalizer | None
    normalizer = build(Normalizer | None, merge(sources_of([], options), schema).get("normalization"))
    return normalizer


def _test_set(config: list[str], overrides: Sequence[str], ids: Path | None) -> tuple[GroundTruth, MatrixLayout]:
    """Return the ground truth of a dataset's test split or a table of texts, and the order of rows and columns."""
    from tvr_lightning.config.recipe import data_from_recipe
    from tvr_lightning.data.ground_truth import GroundTruth
    from tvr_lightning.evaluation.matrix_layout import layout_of, read_layout

    if ids is not None and not config and not overrides:
        layout = read_layout(ids)
        split = layout.split
        truth = GroundTruth(layout.video_of_text, len(split.videos), ids.stem, "test", split.protocol, where=ids.name)
        return truth, layout
    dataset = data_from_recipe(config, overrides)
    dataset.check_present("test", annotations_only=True)  # videos may be missing
    split = dataset.read_split("test")
    truth = dataset.ground_truth("test")
    layout = layout_of(split, truth.where) if ids is None else read_layout(ids, split, truth.where)
    return replace(truth, video_of_text=layout.video_of_text, videos=len(layout.split.videos)), layout
