"""One planned run in a process of its own, which leaves its card.

A process per run gives each its own memory, and a run that is killed takes no other with it. Which process it is, an
engine decides (`engines`); `python -m tvr_lightning.reproduce.runs.execute TASK.json` is one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tvr_lightning.audit.run import AuditedCLI
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.answers import AnswerEvaluation
from tvr_lightning.evaluation.evaluator import Evaluation
from tvr_lightning.extract.plan import ExtractOptions
from tvr_lightning.extract.run import extract
from tvr_lightning.extract.source import source_of_data
from tvr_lightning.progress import FileBar
from tvr_lightning.recipe import from_recipe
from tvr_lightning.recipe_files import RecipeError
from tvr_lightning.reproduce.runs.card import Card, card_path, ranks_path, write_card, write_ranks
from tvr_lightning.reproduce.runs.fingerprint import code_fingerprint, config_fingerprint
from tvr_lightning.reproduce.runs.forecast import PROGRESS
from tvr_lightning.reproduce.runs.memory import peak_memory_mib
from tvr_lightning.run import RunCLI
from tvr_lightning.training.bar import ProgressFile
from tvr_lightning.training.reliability import newest_checkpoint
from tvr_lightning.training.run_folder import RunTrainer

_WATCH_SECONDS = 1.0
_ATTEMPTS = "attempts.json"
# Of the code that this process computes with, which an editor may change on disk while it runs.
_CODE = code_fingerprint()


@dataclass
class RunTask:
    """A run to make.

    Attributes:
        run: the planned run, as plain values.
        arguments: of Lightning's command line, the verb first; none is there where features are stored.
        cards: folder of the cards.
        folder: of the run's logs and checkpoints.
        parent: process that waits for this one; where it ends, so does this one. None for a job that outlives it.
    """

    run: dict[str, Any]
    arguments: list[str]
    cards: str
    folder: str
    parent: int | None = None


def write_task(task: RunTask, path: Path) -> None:
    """Write a task for the process that carries it out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(task), indent=2) + "\n", encoding="utf-8")


def read_task(path: Path) -> RunTask:
    """Read a task."""
    return RunTask(**json.loads(path.read_text(encoding="utf-8")))


def execute(task: RunTask) -> Path | None:
    """Make a run and write its card and ranks.

    Returns:
        The card; None in the processes of a distributed run that do not write it.

    Raises:
        RecipeError: code or recipes are no longer those that the run was planned with, or it evaluates nothing.
        UserError: what else a user can mend, such as missing data.
    """
    _check_plan(task.run)
    earlier, began = _earlier_seconds(Path(task.folder)), time.time()
    warned: list[str] = []
    _collect_warnings(warned)
    made = _extract(task) if task.run["verb"] == "extract" else _evaluate(task)
    if made is None:
        return None
    card = Card(
        key=task.run["key"],
        name=task.run["name"],
        status="finished",
        run=task.run,
        seconds=round(earlier + time.time() - began, 1),
        peak_memory_mib=None if (peak := peak_memory_mib()) is None else round(peak, 1),
        peak_device_memory_mib=torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None,
        warnings=list(dict.fromkeys(warned)),
        **made,
    )
    return write_card(card, Path(task.cards))


def _extract(task: RunTask) -> dict[str, Any]:
    """Store the features of a recipe's dataset, or complete them; return the card's fields."""
    method, data = from_recipe([], task.arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store = Path(task.folder) / "features"
    options = ExtractOptions(str(store), num_workers=0, progress=False, device=device, command="tvr reproduce")
    bar = FileBar(Path(task.folder) / PROGRESS, tasks=2)  # texts, then videos
    report = extract(source_of_data(data), method.encoder, getattr(method, "audio_encoder", None), options, bar)
    print("\n".join(report.lines()))
    return {"features": str(store), "results": asdict(report)}


class _WatchedCLI(AuditedCLI):
    """A run whose progress the waiting process reads."""

    def __init__(self, task: RunTask) -> None:
        self._progress = Path(task.folder) / PROGRESS
        self._progress.unlink(missing_ok=True)  # of an attempt that was killed
        super().__init__(args=task.arguments)

    def instantiate_trainer(self, **kwargs: Any) -> RunTrainer:
        """Build the trainer with what writes the progress."""
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks.append(ProgressFile(self._progress))  # type: ignore[attr-defined]
        return trainer


def _evaluate(task: RunTask) -> dict[str, Any] | None:
    """Train where it is asked for, evaluate, and write the ranks; return the card's fields."""
    cli = _WatchedCLI(task)
    logs = cli.trainer.log_dir  # asks every process, so that none may have left
    if not cli.trainer.is_global_zero:
        return None
    evaluation = cli.model.evaluation
    if not isinstance(evaluation, Evaluation | AnswerEvaluation) or logs is None:
        raise RecipeError(f"{task.run['name']} evaluated nothing, but a run of a table must end with an evaluation")
    results = json.loads((Path(logs) / "results.json").read_text(encoding="utf-8"))
    ranks = ranks_path(card_path(Path(task.cards), task.run["key"]))
    if isinstance(evaluation, Evaluation):
        texts, videos = evaluation.text_to_video_ranks, evaluation.video_to_text_ranks
        video_of_text = cli.datamodule.ground_truth("test").video_of_text
        own = video_of_text[texts.index.cpu()]
        write_ranks(ranks, {"text_to_video": (texts, own), "video_to_text": (videos, videos.index)})
    else:
        write_ranks(ranks, {"question": cli.model.hits})
    steps, epochs = _trained(results["checkpoint"], cli)
    return {"results": results, "checkpoint": results["checkpoint"], "steps": steps, "epochs": epochs}


def _trained(checkpoint: str | None, cli: RunCLI) -> tuple[int, int]:
    """Steps and epochs behind the weights: those of their file, or of this run where it keeps no checkpoints."""
    if checkpoint is None:
        return cli.trainer.global_step, cli.trainer.current_epoch
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    return int(saved["global_step"]), int(saved["epoch"]) + 1


def _check_plan(run: dict[str, Any]) -> None:
    """A number must not bear the fingerprint of what it was not made with: a queue may be days long."""
    now = {"code": _CODE, "config": config_fingerprint([Path(path) for path in run["configs"]], run["settings"])}
    changed = [name for name, value in now.items() if value != run["fingerprints"][name]]
    if changed:
        raise RecipeError(
            f"{run['name']}: {' and '.join(changed)} changed after the run was planned. Rerun tvr reproduce."
        )


def _earlier_seconds(folder: Path) -> float:
    """Seconds of interrupted attempts at this run, each up to the checkpoint that the next went on from.

    Notes the start of this one. Processes of further devices only read.
    """
    path = folder / _ATTEMPTS
    done, began = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else (0.0, None)
    # A run's folder holds one method's runs on one dataset.
    left = (newest_checkpoint(runs) for runs in folder.iterdir() if runs.is_dir())
    checkpoint = next((found for found in left if found), None)
    if began is not None and checkpoint is not None:
        done += max(checkpoint.stat().st_mtime - began, 0.0)
    if "LOCAL_RANK" not in os.environ and os.environ.get("SLURM_PROCID", "0") == "0":
        path.write_text(json.dumps([done, time.time()]), encoding="utf-8")
    return float(done)


def _collect_warnings(into: list[str]) -> None:
    show = warnings.showwarning

    def collect(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        into.append(f"{category.__name__}: {message}")
        show(message, category, *rest, **named)

    warnings.showwarning = collect


def _exit_with(parent: int) -> None:
    """Leave when the parent has gone: a killed `tvr reproduce` must not leave a run that its successor repeats."""
    process = multiprocessing.parent_process()
    if process is not None:
        wait([process.sentinel])
    else:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
    os._exit(1)


def run_task(path: Path) -> int:
    """Carry out a task; return the exit status. What a user can mend is one sentence on the error stream.

    Args:
        path: of the task, as `write_task` wrote it.
    """
    task = read_task(path)
    if task.parent is not None:
        # For further devices Lightning repeats this command: such a process lives as long as the one that started it.
        parent = os.getppid() if "LOCAL_RANK" in os.environ else task.parent
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    try:
        execute(task)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run_task_logged(path: Path, log: Path) -> int:
    """Carry out a task with everything it says going to a file; return the exit status.

    Args:
        path: of the task.
        log: file for output and errors of this process and of those it starts, behind what it holds already: SLURM
            starts a process per device, and all of them write here.
    """
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        return run_task(path)
    except Exception:  # noqa: BLE001  it is written where the parent looks for it
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(run_task(Path(sys.argv[1])))
