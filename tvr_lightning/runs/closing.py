"""End of a run: selection of the tested weights, and its results as table, files, and page."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Split
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.answers import AnswerResults, write_answers
from tvr_lightning.evaluation.evaluator import Evaluation
from tvr_lightning.evaluation.intervals import write_ranks
from tvr_lightning.evaluation.results import (
    Results,
    RunResults,
    SelectOn,
    captions,
    print_results,
    results_of,
    write_predictions,
    write_results,
)
from tvr_lightning.evaluation.weights import Weights, weights_of
from tvr_lightning.files import write_whole
from tvr_lightning.methods.video_qa import VideoQuestionAnswering
from tvr_lightning.training.callback_checks import AVERAGING
from tvr_lightning.training.checkpoints import PACKAGE, RECORD, read_checkpoint
from tvr_lightning.training.distributed import device_warnings
from tvr_lightning.training.module import pretrained_weights

if TYPE_CHECKING:
    from tvr_lightning.runs.run import Run

PAGE, RANKS, PREDICTIONS = "run.md", "ranks.parquet", "predictions.parquet"
_FILES = {
    "results.json": "all results, with the data and the options; results.csv contains only the table",
    "config.yaml": "all options of the run, including defaults",
    "metrics.csv": "logged metrics, one column each; also in the TensorBoard event files",
    "log.txt": "console output of the run",
    RANKS: "rank of every query, with the numbers of videos or texts that score higher (better) and the same (tied)",
    PREDICTIONS: "top-ranked videos of every text, written by tvr predict",
    "checkpoints/last.ckpt": "checkpoint of the last epoch",
    "checkpoints/best.ckpt": "checkpoint with the best validation score",
}


def check_selection(select_on: SelectOn, data: TextVideoDataModule, trainer: Trainer) -> None:
    """Raise a UserError if the run does not validate, or validates on another split than `select_on`."""
    if select_on == "last":
        return
    validated = "test" if data.validation == "test" else "val"
    if select_on != validated:
        raise UserError(
            f"results.select_on: {select_on} selects by the validation loop, but {type(data).__name__} split "
            f"{data.split} validates on its {validated} videos. Use results.select_on: last or {validated} (test is "
            f"optimistic), or set data.init_args.holdout to {'0' if data.holdout else 'a number of training videos'}."
        )
    every, epochs, limit = trainer.check_val_every_n_epoch, trainer.max_epochs, trainer.limit_val_batches
    never = every is not None and epochs is not None and 0 < epochs < every
    if not trainer.checkpoint_callbacks or not limit or never:
        raise UserError(
            f"results.select_on: {select_on} needs a checkpoint of a validation, but trainer.enable_checkpointing, "
            f"trainer.limit_val_batches: {limit:g}, or trainer.check_val_every_n_epoch: {every} and "
            f"trainer.max_epochs: {epochs} writes none. Change it, or use results.select_on: last."
        )


def selected_checkpoint(select_on: SelectOn, trainer: Trainer) -> tuple[str | None, dict[str, Any] | None]:
    """Return the checkpoint of the selected weights and its contents, or None if the run writes none."""
    name = "last" if select_on == "last" else "best"
    written = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.filename == name]
    path = written[0].best_model_path if written else ""
    if not path:
        if select_on == "last":
            return None, None
        raise UserError(
            f"results.select_on: {select_on} found no best checkpoint, since no validation has taken place. Test the "
            "last weights with results.select_on: last."
        )
    saved = read_checkpoint(Path(path))
    step = int(saved["global_step"])
    if select_on == "last" and step != trainer.global_step:
        raise UserError(
            f"{path} contains the weights of step {step}, but the run ended at step {trainer.global_step}, so nothing "
            f"was tested. Resume from it with --ckpt_path={path}"
        )
    return path, saved


def starting_weights(run: Run) -> Weights:
    """Return the record of the weights that are evaluated without a checkpoint."""
    encoder = run.config.model.init_args.encoder.as_dict()
    start = pretrained_weights(encoder.get("init_args") or {})
    if start is None:
        kind = encoder["class_path"].rpartition(".")[2]
        return Weights("untrained", start=f"the encoder {kind} starts from random weights")
    new = new_layers(run.model)
    rest = f", and {new} parameters outside the encoder are untrained" if new else ""
    return Weights("zero-shot", start=f"the encoder has its pretrained weights ({start}){rest}")


def new_layers(model: LightningModule) -> int:
    """Return the number of parameters of a method apart from its encoders and the temperature, which come from CLIP."""
    known = {"encoder", "audio_encoder", "temperature"}
    return sum(p.numel() for name, p in model.named_parameters() if known.isdisjoint(name.split(".")[:2]))


def _evaluated_weights(run: Run, saved: dict[str, Any] | None) -> Weights:
    trainer = run.trainer
    if run.command == "fit" and saved is None and trainer.global_step:
        folder = str(run.folder) if run.folder else None
        averaged = any(isinstance(callback, AVERAGING) for callback in trainer.callbacks)
        return Weights("last", folder, trainer.current_epoch, trainer.global_step, averaged=averaged)
    if saved is None and (run.command == "fit" or run.ckpt_path is None):
        return starting_weights(run)
    weights = Weights("unknown") if saved is None else weights_of(saved)
    return replace(weights, overridden=[change for change, scored in run.recipe.changes.items() if scored])


def write_best_videos(run: Run) -> None:
    """Write the best videos of every text, or the answers, as parquet."""
    predictions = run.model.predictions
    if predictions is None or not run.trainer.is_global_zero:
        return
    path = (run.folder or Path(run.config.results.directory)) / PREDICTIONS
    if isinstance(run.model, VideoQuestionAnswering):
        write_answers(path, predictions)
    else:
        write_predictions(path, run.datamodule.read_split("test"), *predictions)
    print(f"Wrote {path}")


def log_final_metrics(run: Run) -> None:
    """Log the last metrics with the hyperparameters for TensorBoard's table; W&B's summary contains them already."""
    metrics = {name: float(value) for name, value in run.final_metrics.items()}
    for logger in run.trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(run.model.hyperparameters(), metrics, run.trainer.global_step)
            logger.save()


def close(run: Run, checkpoint: str | None, saved: dict[str, Any] | None) -> None:
    """Print the results table, and write results, ranks, and the page of a run.

    `checkpoint` is the file of the evaluated weights, and `saved` its contents, if known.
    """
    model = run.model
    data = run.datamodule
    evaluation = model.evaluation
    log_final_metrics(run)
    if evaluation is None:
        return
    skipped = model.encoded.skipped_anywhere()  # synchronizes all processes
    if not run.trainer.is_global_zero:
        return
    weights = _evaluated_weights(run, saved)
    record = (saved or {}).get(RECORD) or {}
    if saved is None and weights.kind == "last":  # trained by this run, without checkpoints
        record = run.checkpoint_io.record
    words = model.encoder.positions(data.words)
    preprocessing = {
        "words_asked": data.words,
        "words": words,
        "preparation": data.preparation.describe(),
        **model.encoder.inputs_used(),
    }
    if data.copies is not None:
        preprocessing["data"] = data.copies.how.describe()
    details: dict[str, Any] = {
        "select_on": weights.select_on,
        "weights": weights,
        "checkpoint": checkpoint,
        "trained_on": record.get("trained_on"),
        "skipped": skipped,
        "config": run.recipe.plain(),
        "precision": str(run.trainer.precision),
        "seed": run.config.seed_everything,
        "preprocessing": preprocessing,
    }
    split = data.read_split("val" if run.command == "validate" else "test")
    results: RunResults
    if isinstance(model, VideoQuestionAnswering):
        results = AnswerResults(
            method=f"Question answering with {type(model.method).__name__}",
            dataset=data.full_title,
            split=data.split,
            protocol=split.protocol,
            evaluation=evaluation,
            learned_answers=len(model.vocabulary),
            warnings=[*data.warnings, *run.recipe.replaced],
            **details,
        )
    else:
        tokenizer = getattr(model.encoder, "tokenizer", None)
        cut = 0 if tokenizer is None else sum(tokenizer.needed(text.text) > words for text in split.texts)
        if cut:
            counted = f"texts with more than {words} tokens were truncated ({cut} of {len(split.texts)})"
            evaluation.warnings.append(counted)
        if record.get("training_set") and record["trained_on"] == data.full_title:
            evaluation.protocol += f", trained on {record['training_set']}"
        evaluation.warnings += [*run.recipe.replaced, *model.encoder.remarks]
        if weights.kind in ("last", "best", "running"):
            evaluation.warnings += device_warnings(model.released_devices, model.gather, record.get("devices"))
        results = results_of(evaluation, method=model.title, **details)
    print_results(results)
    if run.folder is None:
        return
    paths = write_results(results, run.folder)
    if isinstance(results, Results):
        if run.command != "validate":  # the validation split of some datasets is the test split
            write_query_ranks(run.folder, evaluation, split, data.ground_truth("test").video_of_text)
        write_run_page(run.folder, results, shlex.join(["tvr", *run.words]), type(model).__module__)
    print(f"Wrote {paths[0]} and {paths[1].name}")


def write_run_page(folder: Path, results: Results, command: str, module: str) -> Path:
    """Write a page about a run and return its path; its commands trust the `module` of a method from elsewhere."""
    columns = results.table()
    table = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    page = f"""# {results.method} on {results.dataset}

{results.protocol}. Created on {datetime.date.today().isoformat()} with this command:

```
{command}
```

{_lines("| {} |", map(" | ".join, table))}

{_lines("- {}", captions(results))}

## Files

{_lines("- {}", [f"`{name}`: {what}" for name, what in _FILES.items() if (folder / name).exists()])}
"""
    if results.checkpoint is not None:
        options = f"--ckpt_path {shlex.quote(results.checkpoint)}"
        if module.partition(".")[0] != PACKAGE:
            options += f" --trust {module}"
        commands = [f"tvr test {options}", f"tvr predict {options}", f"tvr index VIDEOS/ --out my-index {options}"]
        page += "\n## Next steps\n\n"
        if Path(results.checkpoint).resolve().parent.parent == folder.resolve():  # trained by this run
            page += "The first two commands write to the subfolders `test/` and `predict/`.\n\n"
            commands.append(f"{command} --checkpoints.resume=true   # resume after an interruption")
        page += f"```\n{_lines('{}', commands)}\n```\n"
    write_whole(folder / PAGE, page.encode())
    return folder / PAGE


def _lines(form: str, values: Iterable[str]) -> str:
    return "\n".join(form.format(value) for value in values)


def write_query_ranks(folder: Path, evaluation: Evaluation, split: Split, video_of_text: Tensor) -> None:
    """Write the ranks of all queries; `video_of_text` (N,) int64 are positions of videos in the split."""
    texts = evaluation.text_to_video_ranks
    videos = evaluation.video_to_text_ranks
    matches = [split.videos[place].video_id for place in video_of_text[texts.index.cpu()].tolist()]
    own = [split.videos[place].video_id for place in videos.index.tolist()]
    queries = [split.texts[place].text for place in texts.index.tolist()] + own
    write_ranks(folder / RANKS, {"text_to_video": (texts, matches), "video_to_text": (videos, own)}, queries)
