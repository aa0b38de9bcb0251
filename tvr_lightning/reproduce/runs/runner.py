"""Carries out a plan: each run in a process of its own that an engine starts, skipping what a card says is done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tvr_lightning.errors import UserError
from tvr_lightning.files import held
from tvr_lightning.reproduce.runs.card import Card, card_path, read_card, read_cards, write_card
from tvr_lightning.reproduce.runs.engines import LOG, CommandEngine, Engine, ForkingEngine, Job
from tvr_lightning.reproduce.runs.execute import RunTask, write_task
from tvr_lightning.reproduce.runs.forecast import beat, duration, open_runs, time_left
from tvr_lightning.reproduce.runs.plan import FIXTURE_SEED, Plan, PlannedRun
from tvr_lightning.synthetic import synthesize

ERROR_LINES = 15
# A card written on another machine may take a while to be seen on a shared disk.
CARD_SECONDS = 30.0
FAR_SECONDS = 1.0
TRAINED_IN = "--model.init_args.encoder.init_args.trained_in"
Log = Callable[[str], None]


def nothing(_: str) -> None:
    """Say nothing."""


class RunnerError(UserError, RuntimeError):
    """Runs cannot be made in this folder now; the message says why."""


@dataclass(frozen=True)
class Folders:
    """Where an invocation leaves what it makes.

    Attributes:
        out: parent of all.
    """

    out: Path

    @property
    def cards(self) -> Path:
        """Folder of the run cards."""
        return self.out / "cards"

    @property
    def runs(self) -> Path:
        """Folder of checkpoints, stored features and logs of the runs."""
        return self.out / "runs"

    @property
    def tables(self) -> Path:
        """Folder of the written tables."""
        return self.out / "tables"


def run_plan(
    plan: Plan, folders: Folders, log: Log = print, engine: Engine | None = None, far: Log = nothing
) -> dict[str, Card]:
    """Make every open run of a plan and return all its cards.

    A run that fails leaves a card that says why; what needs its weights fails with it. Failed runs are made again by
    the next invocation, finished ones never.

    Args:
        plan: the runs.
        folders: where cards, checkpoints and logs go.
        log: takes the lines of progress.
        engine: starts the processes; by default this machine, one run after another.
        far: takes a line that says how far the runs are, as often as they are looked at.

    Raises:
        CardError: a card in the folder cannot be used.
        RunnerError: another invocation makes runs in the same folder.
    """
    folders.out.mkdir(parents=True, exist_ok=True)
    # Two invocations would write into each other's runs.
    busy = RunnerError(f"Another tvr reproduce is running in {folders.out}. Wait for it, or pass another --out.")
    with held(folders.out / ".lock", busy, "do not start a second tvr reproduce in it", log):
        cards = read_cards(folders.cards)
        for key in cards.keys() & plan.runs.keys():
            _add_claims(plan.runs[key], cards[key], folders)
        todo, fixture = open_runs(plan, cards), plan.setting.fixture_videos
        if fixture is not None:
            for dataset in dict.fromkeys(run.dataset for run in todo):
                write_fixture(dataset, plan.setting.root, fixture, log)
        if engine is None:
            engine = CommandEngine() if fixture is None else ForkingEngine()
        _Invocation(folders, log, far, engine, cards, waiting=todo, total=len(todo)).run_all()
        return {key: card for key, card in cards.items() if key in plan.runs}


def _add_claims(run: PlannedRun, card: Card, folders: Folders) -> None:
    """Have the card of an earlier invocation name the lines that the run stands for now: reports read cards alone."""
    claims = list(dict.fromkeys([*card.run["claims"], *run.claims]))
    if claims != card.run["claims"]:
        card.run["claims"] = claims
        write_card(card, folders.cards)


@dataclass
class _Invocation:
    """The runs that are still to be made, those that run, and what has come of the others."""

    folders: Folders
    log: Log
    far: Log
    engine: Engine
    cards: dict[str, Card]
    waiting: list[PlannedRun]
    total: int
    running: dict[str, tuple[PlannedRun, Job, float]] = field(default_factory=dict)
    started: int = 0
    told: float = 0.0

    def run_all(self) -> None:
        """Start what may start, and take in what has ended, until nothing is left."""
        while self.waiting or self.running:
            for run in [run for run in self.waiting if self._is_ready(run)]:
                if len(self.running) < self.engine.at_once:
                    self.waiting.remove(run)
                    self._recorded(run, self._start)
            for run, _, _ in list(self.running.values()):
                self._recorded(run, self._collect)
            if self.running:
                self._say_far()
                time.sleep(self.engine.poll_seconds)

    def _say_far(self) -> None:
        if time.monotonic() - self.told >= FAR_SECONDS:
            self.told = time.monotonic()
            running = list(self.running.values())
            self.far(beat(running, self.waiting, self.folders.runs, self.cards, self.engine.at_once))

    def _recorded(self, run: PlannedRun, step: Callable[[PlannedRun], None]) -> None:
        """Whatever goes wrong with a run is its card's error, and the others go on."""
        began = time.time()
        try:
            step(run)
        except Exception as error:  # noqa: BLE001  a queue that refuses, a full disk: the card says it
            self.running.pop(run.key, None)
            said = str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
            self._finish(run, _failed(run, self.folders, said, began))

    def _collect(self, run: PlannedRun) -> None:
        _, job, began = self.running[run.key]
        status = job()
        if status is not None:
            del self.running[run.key]
            self._finish(run, self._card(run, status, began))

    def _is_ready(self, run: PlannedRun) -> bool:
        unfinished = {waiting.key for waiting in self.waiting} | set(self.running)
        return not unfinished & set(run.needs.values())

    def _start(self, run: PlannedRun) -> None:
        self.started += 1
        seed = "" if run.seed is None else f", seed {run.seed}"
        self.log(f"[{self.started}/{self.total}] {run.name}{seed} ...")
        began = time.time()
        taken = {name: self._made(name, key) for name, key in run.needs.items()}
        folder = (self.folders.runs / run.key).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        cards = self.folders.cards.absolute()
        if run.key in self.cards:  # of a failure, which is made good now
            card_path(cards, run.key).unlink(missing_ok=True)
        task = RunTask(run.plain(), arguments_of(run, folder, taken), str(cards), str(folder), self.engine.parent)
        write_task(task, folder / "run.json")
        self.running[run.key] = (run, self.engine.start(folder / "run.json"), began)

    def _made(self, name: str, key: str) -> str:
        """The weights or features that another run left.

        Raises:
            RunnerError: it failed, or they are gone.
        """
        card = self.cards.get(key)
        path = None if card is None else card.features if name == "features" else card.checkpoint
        if path is None:
            raise RunnerError(f"the required {name} come from run {key}, which failed")
        if not Path(path).exists():
            raise RunnerError(f"the {name} {path} are missing. Also delete the card of their run.")
        return path

    def _card(self, run: PlannedRun, status: int, began: float) -> Card:
        """The card that a run left; its process may still have stumbled at its own end."""
        path = card_path(self.folders.cards, run.key)
        deadline = time.monotonic() + CARD_SECONDS
        while status == 0 and not path.is_file() and time.monotonic() < deadline:
            time.sleep(self.engine.poll_seconds)
        if not path.is_file():
            return _failed(run, self.folders, _tail(self.folders.runs / run.key, status), began)
        return read_card(path)

    def _finish(self, run: PlannedRun, card: Card) -> None:
        self.cards[run.key] = card
        left = [*self.waiting, *(other for other, _, _ in self.running.values())]
        remains = time_left(left, self.cards, self.engine.at_once)
        self.log(f"[{self.total - len(left)}/{self.total}] {_outcome(card)}; {remains}")


def _tail(folder: Path, status: int) -> str:
    """The end of what a process said; one that died at once said nothing."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.is_file() else []
    return "\n".join([f"exit status {status}", *lines[-ERROR_LINES:]])


def write_fixture(dataset: str, root: Path, videos: int, log: Log = print) -> None:
    """Write a synthetic dataset unless it is there as a whole.

    Args:
        dataset: layout, such as `msrvtt`.
        root: parent folder of the datasets.
        videos: how many.
        log: takes the lines of progress.
    """
    if not (root / dataset).is_dir():
        log(f"Writing the synthetic {dataset}: {videos} videos into {root}")
    synthesize(dataset, root, videos, FIXTURE_SEED, workers=os.cpu_count() or 1)  # type: ignore[arg-type]


def arguments_of(run: PlannedRun, folder: Path, taken: Mapping[str, str]) -> list[str]:
    """Return the command line of a run, and write the table's own values where it finds them.

    Args:
        run: to be made.
        folder: of the run.
        taken: for each of the run's `needs` the checkpoint or the folder of features.
    """
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump(run.settings), encoding="utf-8")
    options = {"encoder": TRAINED_IN, "features": "--data.init_args.features"}
    what = [
        *[f"--config={path}" for path in run.configs],
        *([f"--config={settings}"] if run.settings else []),
        *run.overrides,
        *[f"{option}={taken[name]}" for name, option in options.items() if name in taken],
    ]
    if run.verb == "extract":
        return what
    return [
        run.verb,
        *what,
        f"--results.directory={folder}",
        *(["--checkpoints.resume=true"] if run.verb == "fit" else []),
        *(["--trainer.devices=1"] if run.fixture_videos is not None else []),
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        # A table's line may be about other options at test than in training.
        *([f"--ckpt_path={taken['weights']}", "--override"] if "weights" in taken else []),
    ]


def _failed(run: PlannedRun, folders: Folders, error: str, began: float) -> Card:
    card = Card(run.key, run.name, "failed", run.plain(), error=error, seconds=round(time.time() - began, 1))
    write_card(card, folders.cards)
    return card


def _outcome(card: Card) -> str:
    if card.status == "failed":
        last = (card.error or "").strip().splitlines()[-1]
        return f"{card.name} FAILED: {last}"
    took = duration(card.seconds or 0.0)
    if card.features is not None:
        return f"{card.name}: features stored in {took}"
    accuracy = card.accuracy()
    found = card.metrics("text_to_video").get("R@1")
    said = f"accuracy {accuracy:.1f}" if accuracy is not None else f"text-to-video R@1 {found:.1f}"
    return f"{card.name}: {said} in {took}"
