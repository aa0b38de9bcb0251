"""End of a run: selection of the tested weights, and its results as table and files."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from tvr_lightning.config.recipe_files import OptionError, RecipeError
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.evaluation.answers import AnswerResults, write_answers
from tvr_lightning.evaluation.predictions import write_predictions
from tvr_lightning.evaluation.results import SelectOn, print_results, results_of, write_results
from tvr_lightning.evaluation.weights import Weights, weights_of
from tvr_lightning.methods.video_qa import VideoQuestionAnswering
from tvr_lightning.runs.folder import run_folder
from tvr_lightning.runs.page import write_query_ranks, write_run_page
from tvr_lightning.training.checkpoints import RECORD, read_checkpoint

if TYPE_CHECKING:
    from tvr_lightning.runs.run import Run


def check_selection(select_on: SelectOn, data: TextVideoDataModule, trainer: Trainer) -> None:
    """Refuse to train if no weights can be selected on the given split.

    Raises:
        OptionError: The data has no such split, or the run never validates.
    """
    on_test = data.validation == "test"
    if select_on == "val" and on_test:
        raise OptionError(
            f"results.select_on: val needs a validation split, but {type(data).__name__} split "
            f"{data.split} validates on its test videos. Set data.init_args.holdout to a number of "
            "training videos, or use results.select_on: last (or test, which is optimistic)."
        )
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    never = {
        "trainer.enable_checkpointing: false": not trainer.checkpoint_callbacks,
        f"trainer.limit_val_batches: {trainer.limit_val_batches:g}": not trainer.limit_val_batches,
        f"trainer.check_val_every_n_epoch: {every} and trainer.max_epochs: {epochs}": (
            every is not None and epochs is not None and 0 < epochs < every
        ),
    }
    if select_on != "last" and any(never.values()):
        option = next(option for option, holds in never.items() if holds)
        raise OptionError(
            f"results.select_on: {select_on} needs a checkpoint of a validation, but {option} writes none. "
            "Change it, or use results.select_on: last."
        )
    if select_on == "test" and not on_test:
        raise OptionError(
            f"results.select_on: test selects by the validation loop, which here runs on the "
            f"{data.validation} validation split. Use results.select_on: val or last."
        )


def check_written(select_on: SelectOn, trainer: Trainer) -> str | None:
    """Return the checkpoint of the selected weights, None if the run writes none.

    Raises:
        RecipeError: The selected weights were not written, or are not from the last step.
    """
    name = "last" if select_on == "last" else "best"
    written = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.filename == name]
    path = written[0].best_model_path if written else ""
    if select_on != "last" and not path:
        raise RecipeError(
            f"results.select_on: {select_on} found no best checkpoint, since no validation has taken place. Test the "
            "last weights with results.select_on: last."
        )
    if not path:
        return None
    saved = int(read_checkpoint(Path(path))["global_step"])
    if select_on == "last" and saved != trainer.global_step:
        raise RecipeError(
            f"{path} contains the weights of step {saved}, but the run ended at step {trainer.global_step}, so nothing "
            f"was tested. Resume from it with --ckpt_path={path}"
        )
    return path


def starting_weights(model: LightningModule, options: Namespace) -> Weights:
    """Return the record of the weights that are evaluated without a checkpoint."""
    encoder = options.encoder.as_dict()
    kind, given = encoder["class_path"].rpartition(".")[2], encoder.get("init_args") or {}
    start = given.get("weights") or given.get("trained_in")
    if start in (None, "none"):
        return Weights("untrained", start=f"the encoder {kind} starts from random weights")
    rest = f", and {new_layers(model)} parameters outside the encoder are untrained" if new_layers(model) else ""
    return Weights("zero-shot", start=f"the encoder has its pretrained weights ({start}){rest}")


def new_layers(model: LightningModule) -> int:
    """Return the number of parameters of a method apart from its encoders and the temperature, which come from CLIP."""
    known = ("encoder", "audio_encoder", "temperature")
    return sum(p.numel() for name, p in model.named_parameters() if not {*name.split(".")[:2]} & {*known})


def weights_of_fit(run: Run, checkpoint: str | None) -> Weights:
    """Return a description of the weights that a training run selected."""
    trainer, select_on = run.trainer, run.config.results.select_on
    if checkpoint is not None:
        found = weights_of(read_checkpoint(Path(checkpoint)))
        chosen_on = None if select_on == "last" else select_on
        return replace(found, kind="last" if select_on == "last" else "best", chosen_on=chosen_on)
    if not trainer.global_step:
        return starting_weights(run.model, run.config.model.init_args)
    folder = run_folder(trainer)
    return Weights("last", None if folder is None else str(folder), trainer.current_epoch, trainer.global_step)


def weights_of_test(run: Run) -> Weights:
    """Return a description of the weights that a command evaluated."""
    recipe = run.recipe
    if run.ckpt_path is None:
        return starting_weights(run.model, run.config.model.init_args)
    weights = Weights("unknown") if recipe.trained is None else recipe.trained.weights
    return replace(weights, overridden=[str(change) for change in recipe.changes if change.scored])


def write_best_videos(run: Run) -> None:
    """Write the best videos of every text, or the answers, as parquet."""
    predictions, folder = run.model.predictions, run_folder(run.trainer)
    if predictions is None or not run.trainer.is_global_zero:
        return
    path = (folder or Path(run.config.results.directory)) / "predictions.parquet"
    if isinstance(run.model, VideoQuestionAnswering):
        write_answers(path, predictions)
    else:
        split = run.datamodule.read_split("test")
        write_predictions(path, split, *predictions)
    Console().print(f"Wrote {path}", highlight=False, soft_wrap=True)


def close(run: Run, checkpoint: str | None, weights: Weights) -> None:
    """Print the results table, and write results, ranks, and the page of the run."""
    folder, model, data = run_folder(run.trainer), run.model, run.datamodule
    if model.evaluation is None:
        return
    skipped = model.skipped
    if not run.trainer.is_global_zero:
        return
    details: Any = {
        "select_on": weights.select_on,
        "weights": weights,
        "checkpoint": checkpoint,
        "trained_on": trained_on(checkpoint),
        "skipped": skipped,
        "config": run.recipe.plain(),
        "precision": str(run.trainer.precision),
        "seed": run.config.seed_everything,
        "preprocessing": {
            "words_asked": data.words,
            "words": model.encoder.positions(data.words),
            "preparation": data.preparation.describe(),
            **({"data": data.copies.how.describe()} if data.copies is not None else {}),
        },
    }
    if isinstance(model, VideoQuestionAnswering):
        paths = _close_answers(run, details, folder)
    else:
        stage = "val" if run.command == "validate" else "test"
        model.evaluation.warnings += _truncated(run, [text.text for text in data.read_split(stage).texts])
        results = results_of(model.evaluation, method=model.title, **details)
        print_results(results)
        paths = write_results(results, folder) if folder else None
        if folder:
            if run.command != "validate":  # the validation split of some datasets is the test split
                truth = data.ground_truth("test").video_of_text
                write_query_ranks(folder, model.evaluation, data.read_split("test"), truth)
            write_run_page(folder, results, shlex.join(["tvr", *run.words]), type(model).__module__)
    if paths:
        Console().print(f"Wrote {paths[0]} and {paths[1].name}", highlight=False, soft_wrap=True)


def _truncated(run: Run, texts: list[str]) -> list[str]:
    """Return a warning if texts of the split have more tokens than the method uses."""
    tokenizer, words = getattr(run.model.encoder, "tokenizer", None), run.model.encoder.positions(run.datamodule.words)
    cut = 0 if tokenizer is None else sum(tokenizer.needed(text) > words for text in texts)
    return [f"{cut} of {len(texts)} texts have more than {words} tokens and were truncated"] if cut else []


def _close_answers(run: Run, details: dict[str, Any], folder: Path | None) -> tuple[Path, Path] | None:
    model, data = run.model, run.datamodule
    results = AnswerResults(
        method=f"Question answering with {type(model.method).__name__}",
        dataset=data.full_title,
        split=data.split,
        protocol=data.read_split("val" if run.command == "validate" else "test").protocol,
        evaluation=model.evaluation,
        learnt_answers=len(model.vocabulary),
        warnings=data.warnings,
        **details,
    )
    print_results(results)
    return write_results(results, folder) if folder else None


def trained_on(checkpoint: str | None) -> str | None:
    """Return the title of the dataset that a checkpoint file was trained on, or None if it is not recorded."""
    if checkpoint is None or not Path(checkpoint).is_file():
        return None
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    title: str | None = (saved.get(RECORD) or {}).get("trained_on")
    return title
