"""One planned run in a separate process, which writes its card."""

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tvr_lightning.config.recipe import Recipe, from_recipe
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.answers import AnswerEvaluation
from tvr_lightning.evaluation.evaluator import Evaluation
from tvr_lightning.evaluation.intervals import write_ranks
from tvr_lightning.extract.plan import ExtractOptions, source_of_data
from tvr_lightning.extract.run import extract
from tvr_lightning.progress import progress_file, write_state
from tvr_lightning.reproduce.runs.card import Card, peak_memory_mib, write_record
from tvr_lightning.reproduce.runs.plan import PlannedRun, deciding
from tvr_lightning.runs.log import quieten
from tvr_lightning.runs.progress_report import ProgressReport
from tvr_lightning.runs.run import Run

TASK, LOG, PROGRESS = "run.json", "log.txt", "progress.json"  # what a run does, its output, and its progress


def run_task(task: Path) -> int:
    """Make the run of a task file with all output in `log.txt`, and return the exit status."""
    with task.with_name(LOG).open("a", encoding="utf-8") as log:  # of all processes of a distributed run
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Lightning starts the processes of further devices with the command line of this one: `python -m` and its module.
    sys.argv[1:] = [str(task)]
    sys.modules["__main__"].__spec__ = find_spec(f"{__package__}.execute")
    quieten()
    try:
        execute(task)
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
    except Exception:  # noqa: BLE001  the log is where the waiting process looks
        traceback.print_exc()
    return 1


def execute(task: Path) -> None:
    """Make a run and write its card and ranks; in a distributed run, the first process does."""
    content = json.loads(task.read_text(encoding="utf-8"))
    folder = task.parent
    began = time.time()
    run = PlannedRun(**content["run"])
    arguments = content["arguments"]
    cards = Path(content["cards"])
    now = deciding([Path(path) for path in run.configs], run.settings)
    if changed := [name for name, value in now.items() if value != run.fingerprints[name]]:  # a queue may be days long
        raise UserError(f"{run.name}: {' and '.join(changed)} changed after the run was planned. Rerun tvr reproduce.")
    resumed = (folder / PROGRESS).is_file()
    weights = content["ckpt_path"]
    made = _extract(arguments, folder) if run.verb == "extract" else _evaluate(run, arguments, weights, folder, cards)
    if made is None:
        return
    card = Card(run.key, run.name, "finished", asdict(run), **made)
    card.seconds = None if resumed else round(time.time() - began, 1)
    card.peak_memory_mib = peak_memory_mib()
    if torch.cuda.is_available():
        card.peak_device_memory_mib = torch.cuda.max_memory_allocated() / 2**20
    write_record(card, cards / f"{run.key}.json")


def _extract(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Store the features of a recipe's dataset; return the card's fields."""
    method, data = from_recipe([], arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store = str(folder / "features")
    options = ExtractOptions(store, num_workers=0, progress=False, device=device, command="tvr reproduce")
    bar = progress_file(folder / PROGRESS, tasks=2)  # texts, then videos
    report = extract(source_of_data(data), method.encoder, getattr(method, "audio_encoder", None), options, bar)
    print("\n".join(report.lines()))
    return {"features": store, "results": asdict(report)}


def _evaluate(
    run: PlannedRun, arguments: list[str], weights: str | None, folder: Path, cards: Path
) -> dict[str, Any] | None:
    """Train if the command does, evaluate, and write the ranks; return the card's fields in the first process."""
    # The options of a row may differ from those in the training of its weights.
    recipe = Recipe.parse([], arguments, None if weights is None else Path(weights), override=True)
    words = [run.verb, *arguments, *([] if weights is None else [f"--ckpt_path={weights}"])]
    report = ProgressReport(partial(write_state, folder / PROGRESS), seconds=2.0)
    made = Run(run.verb, recipe, weights, words, [report])  # type: ignore[arg-type]
    made.start()
    logs = made.trainer.log_dir  # synchronizes all processes
    if not made.trainer.is_global_zero:
        return None
    evaluation = made.model.evaluation
    if not isinstance(evaluation, Evaluation | AnswerEvaluation) or logs is None:
        raise UserError(f"{run.name} evaluated nothing, but a run of a table must end with an evaluation")
    results = json.loads((Path(logs) / "results.json").read_text(encoding="utf-8"))
    if isinstance(evaluation, Evaluation):
        texts, videos = evaluation.text_to_video_ranks, evaluation.video_to_text_ranks
        own = made.datamodule.ground_truth("test").video_of_text[texts.index.cpu()]
        ranked = {"text_to_video": (texts, own), "video_to_text": (videos, videos.index)}
    else:
        ranked = {"question": made.model.hits}
    write_ranks(cards / f"{run.key}.parquet", ranked)  # type: ignore[arg-type]
    steps = made.trainer.global_step
    epochs = made.trainer.current_epoch
    checkpoint = results["checkpoint"]
    if checkpoint is not None:  # whose weights may be earlier than the last ones
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        steps, epochs = int(saved["global_step"]), int(saved["epoch"]) + 1
    return {"results": results, "checkpoint": checkpoint, "steps": steps, "epochs": epochs}


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":  # the process of a further device, which ends with that of the first one
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.exit(run_task(Path(sys.argv[1])))
