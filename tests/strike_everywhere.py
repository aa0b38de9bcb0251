"""Send a run a signal in every hook of Lightning, one after the other, resume it, and print the results as JSON.

    python strike_everywhere.py SIGKILL|SIGTERM FOLDER FIRST_STEP fit --config ... --results.directory=FOLDER/runs

The command line is parsed and the model built once; every attempt is a fork. This process itself never trains, since
torch refuses to train in forks of a process that has. One undisturbed run records its hooks from optimizer step
FIRST_STEP on, and the files on disk at each of them, which SIGKILL would leave. For SIGTERM, every attempt continues
from those files and gets the signal.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import torch

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision

# isort: split
from lightning.pytorch import Callback
from resume_run import differences

import tvr_lightning.runs.run as run
from tvr_lightning.cli import main

HOOKS = [name for name in dir(Callback) if name.startswith("on_")] + ["setup", "teardown"]


class EveryHook(Callback):
    """Calls `reached` with every hook: its name, the step, and how often it was reached in this step."""

    def __init__(self, reached):
        self.reached, self.counts = reached, Counter()

    def _hook(self, trainer, name):
        self.counts[name, trainer.global_step] += 1
        trainer.strategy.checkpoint_io.teardown()  # what a thread writes is there before the hook
        self.reached(f"{name}:{trainer.global_step}:{self.counts[name, trainer.global_step]}")


for _name in HOOKS:
    setattr(EveryHook, _name, lambda self, trainer, *arguments, _name=_name, **named: self._hook(trainer, _name))


class Attempts:
    """Forks of one prepared command line; called in place of `Run.build_trainer`."""

    def __init__(self, number, folder, first_step):
        self.number, self.folder, self.first_step = number, folder, first_step
        self.build = run.Run.build_trainer
        self.runs, self.states, self.notes = folder / "runs", folder / "states", folder / "hooks.txt"

    def __call__(self, cli, kwargs):
        """Make all attempts. Returns the trainer in forks, and never returns in the process that forks."""
        self.states.mkdir()
        status = self._fork(self._note)
        if status is None:
            return self._trainer(cli, kwargs)
        assert status == 0, (self.folder / "output.txt").read_text()
        (self.folder / "whole").mkdir()
        (whole,) = self.runs.glob("*/*")
        whole.rename(self.folder / "whole" / "run")
        hooks = [line.split() for line in self.notes.read_text().splitlines()]
        hooks = [(hook, state) for hook, state in hooks if int(hook.split(":")[1]) >= self.first_step]
        report, known = [], {}
        for hook, state in hooks:
            attempt = {"hook": hook, "status": -signal.SIGKILL}
            if self.number == signal.SIGKILL and state in known:
                report.append(attempt | known[state])
                continue
            self._restore(state)
            if self.number != signal.SIGKILL:
                attempt["status"] = self._fork(
                    lambda reached, hook=hook: reached == hook and os.kill(os.getpid(), self.number)
                )
                if attempt["status"] is None:
                    return self._trainer(cli, kwargs, resume=True)
                state = self._left()
            if state not in known:
                table = any(self.runs.glob("*/*/results.json"))
                resumed = self._fork(lambda reached: None) if attempt["status"] else 0
                if resumed is None:
                    return self._trainer(cli, kwargs, resume=True)
                known[state] = {"table": table, "resumed": resumed, "differences": self._compare()}
            report.append(attempt | known[state])
        print(json.dumps(report))
        sys.stdout.flush()
        os._exit(0)

    def _note(self, hook):
        """Record a hook and the files on disk."""
        files = [path for path in sorted(self.runs.rglob("*")) if path.is_file()]
        name = hashlib.sha256(repr([(path.name, path.stat().st_ino) for path in files]).encode()).hexdigest()
        if not (self.states / name).exists():
            (self.states / name).mkdir()
            if self.runs.is_dir():
                # Checkpoints are replaced and never changed, so a link keeps their content.
                shutil.copytree(self.runs, self.states / name / "runs", copy_function=os.link)
        with self.notes.open("a") as file:
            file.write(f"{hook} {name}\n")

    def _restore(self, state):
        shutil.rmtree(self.runs, ignore_errors=True)
        if (self.states / state / "runs").is_dir():
            shutil.copytree(self.states / state / "runs", self.runs, copy_function=os.link)

    def _trainer(self, cli, kwargs, resume=False):
        cli.config.checkpoints.resume = resume
        trainer = self.build(cli, **kwargs)
        trainer.callbacks.insert(0, EveryHook(self.reached))
        return trainer

    def _fork(self, reached):
        """Return the exit status of a fork, negative for a signal; None in the fork."""
        numbers = random.getstate()
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        random.setstate(numbers)  # Python reseeds forks
        output = os.open(self.folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        self.reached = reached
        return None

    def _left(self):
        """Return a name for the files on disk."""
        files = sorted([*self.runs.glob("*/*/checkpoints/*"), *self.runs.glob("*/*/results.json")])
        return repr([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])

    def _compare(self):
        """List the differences between the files of the resumed and the undisturbed run."""
        # A run that was struck before its first checkpoint starts again in a new folder.
        whole, found, lines = self.folder / "whole" / "run", sorted(self.runs.glob("*/*"), reverse=True), []
        left, expected = ({path.name for path in run.glob("checkpoints/*")} for run in (found[0], whole))
        if left - {"running.ckpt"} != expected - {"running.ckpt"}:
            return [f"files {left}, expected {expected}"]
        for name in ("best.ckpt", "last.ckpt"):
            saved = [torch.load(run / "checkpoints" / name, weights_only=True) for run in (found[0], whole)]
            lines += [f"{name}: {line}" for line in differences(*saved)]
        if not (found[0] / "results.json").is_file():
            return [*lines, "no table"]
        tables = [json.loads((run / "results.json").read_text()) for run in (found[0], whole)]
        for table in tables:
            del table["config"]["checkpoints"]
        keys = ("text_to_video", "video_to_text", "sum_of_recalls", "checkpoint", "config")
        return lines + differences(*tables, keys)


if __name__ == "__main__":
    torch.set_num_threads(1)
    attempts = Attempts(signal.Signals[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))
    run.Run.build_trainer = lambda cli, **kwargs: attempts(cli, kwargs)
    status = main(sys.argv[4:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
