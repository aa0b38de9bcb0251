"""Carries out a plan: each open run in a separate process, whose card shows that it has finished."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median

import yaml

from tvr_lightning.errors import UserError
from tvr_lightning.files import file_lock
from tvr_lightning.progress import clock, shown
from tvr_lightning.reproduce.runs.card import Card, read_card, read_cards, write_record
from tvr_lightning.reproduce.runs.engines import Engine, Job, LocalEngine
from tvr_lightning.reproduce.runs.execute import LOG, PROGRESS, TASK
from tvr_lightning.reproduce.runs.plan import FIXTURE_SEED, Plan, PlannedRun
from tvr_lightning.synthetic import synthesize

ERROR_LINES = 15
CARD_SECONDS = 30.0  # until a card that another machine wrote is visible on a shared disk
Log = Callable[[str], None]
Duration = tuple[PlannedRun, float]  # in seconds


def run_plan(plan: Plan, out: Path, log: Log = print, engine: Engine | None = None) -> dict[str, Card]:
    """Make every open run of a plan, and return all its cards; `out` receives `cards/` and `runs/`.

    A failed run leaves a card with its error, as do the runs that need it. The next call makes them again.
    """
    out.mkdir(parents=True, exist_ok=True)
    with file_lock(out / ".lock", f"the runs of tvr reproduce in {out}", report=log):
        cards = read_cards(out / "cards")
        for key in cards.keys() & plan.runs.keys():
            claims = cards[key].run["claims"]  # from which a report finds the rows of a run
            if new := [claim for claim in plan.runs[key].claims if claim not in claims]:
                claims += new
                write_record(cards[key], out / "cards" / f"{key}.json")
        todo = open_runs(plan, cards)
        if (videos := plan.setting.fixture_videos) is not None:
            for dataset in dict.fromkeys(run.dataset for run in todo):
                write_fixture(dataset, plan.setting.root, videos, log)
        runner = _Runner(out, log, engine or LocalEngine(), cards, todo, len(todo))
        with shown(runner.state):
            runner.run_all()
        return {key: card for key, card in cards.items() if key in plan.runs}


def open_runs(plan: Plan, cards: Mapping[str, Card]) -> list[PlannedRun]:
    """Return the runs without a card of a finished run."""
    return [run for run in plan.runs.values() if run.key not in cards or cards[run.key].status != "finished"]


def durations_of(cards: Mapping[str, Card]) -> list[Duration]:
    """Return the durations of finished runs."""
    finished = [card for card in cards.values() if card.status == "finished"]
    return [(PlannedRun(**card.run), card.seconds) for card in finished if card.seconds]


def expected_seconds(run: PlannedRun, durations: Sequence[Duration]) -> float | None:
    """Return the median duration of runs of the same kind, on the same dataset if possible."""
    alike = [(other.dataset, seconds) for other, seconds in durations if other.kind == run.kind]
    same = [seconds for dataset, seconds in alike if dataset == run.dataset] or [seconds for _, seconds in alike]
    return median(same) if same else None


def time_left(
    todo: Sequence[PlannedRun], durations: Sequence[Duration], parallel: int = 1, elapsed: float = 0.0
) -> str:
    """Return how many runs are left, and how long they will take, once the duration of a similar one is known."""
    if not todo:
        return "nothing left to run"
    left = f"{len(todo)} {'run' if len(todo) == 1 else 'runs'} left"
    known = [seconds for run in todo if (seconds := expected_seconds(run, durations)) is not None]
    if not known:
        return left
    return f"{left}, about {clock(max(mean(known) * len(todo) - elapsed, 0.0) / min(parallel, len(todo)))}"


@dataclass
class _Runner:
    """The runs of a plan that wait, that run, and that have ended."""

    out: Path
    log: Log
    engine: Engine
    cards: dict[str, Card]
    waiting: list[PlannedRun]
    total: int
    running: dict[str, tuple[PlannedRun, Job, float]] = field(default_factory=dict)

    def run_all(self) -> None:
        """Start and collect runs until none is left."""
        while self.waiting or self.running:
            for run in list(self.waiting):
                unfinished = {other.key for other in self._left()}
                if len(self.running) < self.engine.max_parallel and not unfinished & set(run.needs.values()):
                    self.waiting.remove(run)
                    self._recorded(run, self._start)
            for run, _, _ in list(self.running.values()):
                self._recorded(run, self._collect)
            if self.running:
                time.sleep(self.engine.poll_seconds)

    def _recorded(self, run: PlannedRun, step: Callable[[PlannedRun], Card | None]) -> None:
        """Do a step of a run, which returns its card at its end; an error becomes a card, and other runs continue."""
        try:
            card = step(run)
        except Exception as error:  # noqa: BLE001  such as a full disk
            card = self._failed(run, str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
        if card is not None:
            self.running.pop(run.key, None)
            self.cards[run.key] = card
            left = self._left()
            remaining = time_left(left, durations_of(self.cards), self.engine.max_parallel)
            self.log(f"[{self.total - len(left)}/{self.total}] {_outcome(card)}; {remaining}")

    def _left(self) -> list[PlannedRun]:
        return [*(run for run, _, _ in list(self.running.values())), *self.waiting]

    def _start(self, run: PlannedRun) -> None:
        self.log(f"[{self.total - len(self.waiting)}/{self.total}] {run.name}{_seed(run)} ...")
        self._card(run).unlink(missing_ok=True)  # of an earlier failure
        inputs: dict[str, str] = {}
        for name, key in run.needs.items():
            made = self.cards.get(key)
            path = None if made is None else made.features if name == "features" else made.checkpoint
            if path is None:
                raise UserError(f"the required {name} come from run {key}, which failed")
            if not Path(path).exists():
                raise UserError(f"the {name} {path} are missing. Also delete the card of their run.")
            inputs[name] = path
        task = write_task(run, self.out, inputs)
        task.with_name(LOG).write_text("", encoding="utf-8")
        self.running[run.key] = (run, self.engine.start(task), time.time())

    def _collect(self, run: PlannedRun) -> Card | None:
        status = self.running[run.key][1]()
        if status is None:
            return None
        path = self._card(run)
        deadline = time.monotonic() + CARD_SECONDS
        while status == 0 and not path.is_file() and time.monotonic() < deadline:
            time.sleep(self.engine.poll_seconds)
        if path.is_file():
            return read_card(path)
        lines = (self.out / "runs" / run.key / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return self._failed(run, "\n".join([f"exit status {status}", *lines[-ERROR_LINES:]]))

    def _failed(self, run: PlannedRun, error: str) -> Card:
        seconds = time.time() - self.running[run.key][2] if run.key in self.running else 0.0
        card = Card(run.key, run.name, "failed", asdict(run), error=error, seconds=round(seconds, 1))
        write_record(card, self._card(run))
        return card

    def _card(self, run: PlannedRun) -> Path:
        return self.out / "cards" / f"{run.key}.json"

    def state(self) -> str:
        """Return the current activity of the runs, and the time until the last one ends."""
        doing = []
        durations = durations_of(self.cards)
        elapsed = 0.0
        for run, _, began in list(self.running.values()):
            elapsed += time.time() - began
            try:
                progress = json.loads((self.out / "runs" / run.key / PROGRESS).read_text(encoding="utf-8"))
            except (OSError, ValueError):  # not written yet
                progress = {"doing": "starting", "left": None}
            left = progress["left"]
            if left is not None:
                durations.append((run, time.time() - began + left))
            doing.append(f"{run.name}: {progress['doing']}" + ("" if left is None else f", {clock(left)} left"))
        return "; ".join([*doing, time_left(self._left(), durations, self.engine.max_parallel, elapsed)])


def write_fixture(dataset: str, root: Path, videos: int, log: Log = print) -> None:
    """Write a synthetic dataset, such as `msrvtt`, unless it is complete."""
    if not (root / dataset).is_dir():
        log(f"Writing the synthetic {dataset}: {videos} videos into {root}")
    synthesize(dataset, root, videos, FIXTURE_SEED, workers=os.cpu_count() or 1)  # type: ignore[arg-type]


def write_task(run: PlannedRun, out: Path, inputs: Mapping[str, str]) -> Path:
    """Write what a run does to its folder, and return the file; `inputs` are the paths of what the run `needs`."""
    folder = (out / "runs" / run.key).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump(run.settings), encoding="utf-8")
    arguments = [*(f"--config={path}" for path in (*run.configs, settings)), *run.overrides]
    if "encoder" in inputs:
        arguments.append(f"--model.init_args.encoder.init_args.trained_in={inputs['encoder']}")
    if "features" in inputs:
        arguments.append(f"--data.init_args.features={inputs['features']}")
    if run.verb != "extract":
        arguments += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
        arguments += [f"--results.directory={folder}"]
        arguments += ["--trainer.devices=1"] if run.fixture_videos is not None else []
    if run.verb == "fit":
        arguments.append("--checkpoints.resume=true")
    cards = str((out / "cards").absolute())
    task = {"run": asdict(run), "arguments": arguments, "ckpt_path": inputs.get("weights"), "cards": cards}
    (folder / TASK).write_text(json.dumps(task, indent=2) + "\n", encoding="utf-8")
    return folder / TASK


def _outcome(card: Card) -> str:
    if card.status == "failed":
        return f"{card.name} FAILED: {(card.error or '').strip().splitlines()[-1]}"
    values = {"accuracy": card.accuracy(), "text-to-video R@1": card.metrics("text_to_video").get("R@1")}
    result = [f"{name} {value:.1f}" for name, value in values.items() if value is not None] or ["features stored"]
    return f"{card.name}: {result[0]}" + (f" in {clock(card.seconds)}" if card.seconds else "")


def plan_lines(plan: Plan, cards: Mapping[str, Card]) -> list[str]:
    """Return a line for every run with its state and expected duration, and one for all of them."""
    lines = []
    durations = durations_of(cards)
    todo = open_runs(plan, cards)
    for run in plan.runs.values():
        state = cards[run.key].status if run.key in cards else "open"
        seconds = expected_seconds(run, durations)
        about = f", about {clock(seconds)}" if run in todo and seconds is not None else ""
        name, *others = run.claims or [run.name]
        also = f" (also {', '.join(others)})" if others else ""
        lines.append(f"{state:8s} {run.verb:7s} {name}{also} on {run.dataset}{_seed(run)}{about}")
    return [*lines, time_left(todo, durations)]


def _seed(run: PlannedRun) -> str:
    return "" if run.seed is None else f", seed {run.seed}"
