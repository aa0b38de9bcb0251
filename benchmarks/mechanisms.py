"""Test each paper's claim on synthetic features that contain the factor it names at several strengths, including 0.

Each arm of a claim (mechanisms_claims.py) chooses its learning rate on validation pairs, and is then trained with ten
seeds. The record of each finished head is appended to a file, so an interrupted run resumes, in the order in which
results matter: rates, five seeds at both ends, five more, deviations, and the other strengths. The script then
writes mechanisms.json and, from it, mechanisms.md with figures; claims that lack records are marked. Results of other
code are refused.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import platform
import subprocess
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import mechanisms_heads
import mechanisms_settings
import torch
from mechanisms_claims import CLAIMS, DEVIATIONS, FULL_RATE, LEAKS, RATES, Arm, Size, Trial
from mechanisms_heads import TEXT_TO_VIDEO, Job, outcome
from mechanisms_page import summary, write_page
from mechanisms_settings import BATCH, COPIES, SETTINGS, make_setting

from tvr_lightning.progress import clock

HERE = Path(__file__).parent
Record = dict[str, Any]
Found = dict[str, Record]
SMALL = Size(pairs=1024, queue=1024, epochs=1, seeds=2, extend=False)


@cache
def code(setting: str) -> str:
    """Return a fingerprint of the code of a setting and of the training, without comments and docstrings."""
    made = SETTINGS[setting]
    others = {each.__name__ for each in SETTINGS.values()} - {made.__name__, *made.__code__.co_names}
    text = ""
    for module in (mechanisms_settings, mechanisms_heads):
        tree = ast.parse(inspect.getsource(module))
        tree.body = [node for node in tree.body if not _of_others(node, others)]
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
        text += ast.unparse(tree)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _of_others(node: ast.stmt, others: set[str]) -> bool:
    listed = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FUNCTIONS"
    return listed or (isinstance(node, ast.FunctionDef) and node.name in others)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def key(job: Job) -> str:
    """Return a fingerprint of everything that determines the outcome of a head, except the package and torch."""
    return hashlib.sha256(f"{code(job.setting)}{job!r}".encode()).hexdigest()[:16]


def train(job: Job) -> Record:
    """Train one head with one thread, and return its record."""
    torch.set_num_threads(1)
    start = time.process_time()
    found = outcome(job, make_setting(job.setting, job.seed, job.strength, job.pairs))
    about = {"key": key(job), "code": code(job.setting), "commit": commit(), **vars(job), "head": repr(job.head)}
    return {**about, "seconds": time.process_time() - start, **found}


@cache
def commit() -> str:
    """Return the commit of the checkout."""
    words = ("git", "rev-parse", "--short=8", "HEAD")
    return subprocess.run(words, cwd=HERE, capture_output=True, text=True).stdout.strip() or "no commit"


def read_records(file: Path) -> Found:
    """Return the finished heads by key, and remove a last line that an interrupted run left incomplete.

    Raises:
        SystemExit: A result was computed by other code.
    """
    if not file.exists():
        return {}
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
        print(f"{file}: removed the incomplete last line of an interrupted run", flush=True)
    records = [json.loads(line) for line in whole.splitlines()]
    other = {
        each["setting"] for each in records if each["setting"] not in SETTINGS or each["code"] != code(each["setting"])
    }
    if other:
        raise SystemExit(
            f"{file} contains results of other code for the settings {', '.join(sorted(other))}. Remove their "
            "lines, or pass another file as --records."
        )
    return {record["key"]: record for record in records}


def run(jobs: Iterable[Job], what: str, args: Namespace) -> Found:
    """Train the heads that have no record, append the record of each as soon as it is finished, and return all."""
    records, wanted = read_records(args.records), {key(job): job for job in jobs}
    missing = [job for name, job in wanted.items() if name not in records]
    print(f"{what}: {len(wanted)} heads, {len(wanted) - len(missing)} of them finished", flush=True)
    if missing and not args.collect:
        args.records.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        # Spawned, because torch's threads do not survive a fork.
        pool = multiprocessing.get_context("spawn").Pool(args.num_workers, _end_with_parent)
        with pool, args.records.open("a", encoding="utf-8") as out:
            for count, record in enumerate(pool.imap_unordered(train, missing), 1):
                records[record["key"]] = record
                out.write(json.dumps(record) + "\n")
                out.flush()
                left = (time.monotonic() - start) / count * (len(missing) - count)
                print(f"{count} of {len(missing)}: {record['setting']}, {clock(left)} left", flush=True)
    return {name: records[name] for name in wanted if name in records}


def _end_with_parent() -> None:
    """End a worker when its parent ends; a waiting worker does not notice that its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Plan:
    """Heads to train, and the finished ones."""

    def __init__(self, size: Size) -> None:
        self.size, self.found = size, dict[str, Record]()

    def choice(self, trial: Trial, arm: Arm, point: float) -> tuple[list[Job], Job | None]:
        """Return the jobs with seed 0 that choose the rate of an arm, and the best of them once all are finished.

        Rates are added until the best one, on validation pairs, is between two others or at an end of `RATES`. Of equal
        ones, the one closest to `FULL_RATE` is the best. Arms with the same head share its rate.
        """
        arm = next(each for each in trial.arms if each.head == arm.head)
        point = point if point in trial.ends else trial.points[-1]
        rates = trial.rates(arm)
        while True:
            jobs = [trial.job(arm, point, 0, rate, self.size) for rate in rates]
            if not all(key(job) in self.found for job in jobs):
                return jobs, None
            best = max(jobs, key=lambda job: (self.validation(arm, job), -abs(math.log(job.rate / FULL_RATE))))
            place = RATES.index(best.rate) + (1 if best is jobs[-1] else -1)
            inside = len(rates) == 1 or best not in (jobs[0], jobs[-1])
            if inside or not self.size.extend or place not in range(len(RATES)):
                return jobs, best
            rates = tuple(sorted([*rates, RATES[place]]))

    def validation(self, arm: Arm, job: Job) -> float:
        """Return the text-to-video R@1 of a finished head on the validation pairs."""
        return float(self.found[key(job)]["validation"][arm.reading][TEXT_TO_VIDEO])

    def sweep(self, trials: Sequence[Trial]) -> Iterator[Job]:
        """Yield the jobs that choose rates."""
        for trial in trials:
            for arm in trial.arms:
                for point in trial.ends:
                    yield from self.choice(trial, arm, point)[0]

    def job(self, trial: Trial, arm: Arm, point: float, seed: int) -> Job | None:
        """Return the job of an arm with its best rate, if it is known."""
        best = self.choice(trial, arm, point)[1]
        return best and trial.job(arm, point, seed, best.rate, self.size)

    def seeds(self, trials: Sequence[Trial], seeds: range, *, ends: bool) -> Iterator[Job]:
        """Yield the jobs with the best rates at the ends of the strengths, or between them."""
        for seed, trial in itertools.product(seeds, trials):
            for point in trial.points:
                if (point in trial.ends) == ends:
                    jobs = (self.job(trial, arm, point, seed) for arm in trial.arms)
                    yield from (job for job in jobs if job is not None)

    def train(self, claims: Sequence[Trial], deviations: Sequence[Trial], args: Namespace) -> None:
        """Train all heads, those that matter most first."""
        few, more = range(min(5, self.size.seeds)), range(5, self.size.seeds)
        self.choose(claims, "rates", args)
        self.found |= run(self.seeds(claims, few, ends=True), "first seeds", args)
        self.found |= run(self.seeds(claims, more, ends=True), "other seeds", args)
        self.choose(deviations, "rates of deviations", args)
        self.found |= run(self.seeds(deviations, few, ends=True), "seeds of deviations", args)
        self.found |= run(self.seeds(claims, range(self.size.seeds), ends=False), "other strengths", args)

    def choose(self, trials: Sequence[Trial], what: str, args: Namespace) -> None:
        """Train heads until the best rates of all arms are known."""
        count = -1
        while len(self.found) > count:
            count = len(self.found)
            self.found |= run(self.sweep(trials), what, args)

    def described(self, trial: Trial) -> Record:
        """Return the data of a trial for the page: the runs of all seeds that all arms have."""
        complete = []  # by point, seed, and arm
        for point in trial.points:
            jobs = ([self.job(trial, arm, point, seed) for arm in trial.arms] for seed in range(self.size.seeds))
            found = [[self.found.get(key(job)) if job else None for job in by_arm] for by_arm in jobs]
            complete.append([by_arm for by_arm in found if None not in by_arm])
        arms, refused = [], ""
        for number, arm in enumerate(trial.arms):
            choices = [self.choice(trial, arm, point) for point in trial.ends]
            for point, (_, best) in zip(trial.ends, choices, strict=True):
                if self.size.extend and best and best.rate in (RATES[0], RATES[-1]):
                    refused = f'the best rate of "{arm.name}" at {point:g}, {best.rate:g}, is at the edge of the grid'
            tried = [[job for job in jobs if key(job) in self.found] for jobs, _ in choices]
            arms.append({
                "name": arm.name,
                "role": arm.role,
                "rates": [best and best.rate for _, best in choices],
                "sweep": [[(job.rate, self.validation(arm, job)) for job in jobs] for jobs in tried],
                "runs": [[by_arm[number]["test"][arm.reading] for by_arm in by_seed] for by_seed in complete],
            })  # fmt: skip
        named = {name: getattr(trial, name) for name in ("key", "paper", "setting", "maps", "variant", "points")}
        return {**named, "refused": refused, "arms": arms}


def measure(claims: Sequence[Trial], deviations: Sequence[Trial], size: Size, args: Namespace) -> Record:
    """Choose the rates, train all heads with them, and return the data for the page."""
    plan = Plan(size)
    plan.train(claims, deviations, args)
    about = {
        "command": f"python benchmarks/mechanisms.py{' --small' * args.small}",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "commits": sorted({record["commit"] for record in plan.found.values()}),
        "heads": len(plan.found),
        "minutes": sum(record["seconds"] for record in plan.found.values()) / 60,
        **vars(size),
    }
    return {"about": about, **summary([*map(plan.described, claims)], [*map(plan.described, deviations)])}


def main() -> None:
    """Train, write the data, and write the page."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--claims", nargs="+", choices=sorted({claim.key for claim in CLAIMS}), help="only these claims"
    )
    parser.add_argument("--seeds", type=int, default=Size.seeds, help="at least 2")
    parser.add_argument("--pairs", type=int, default=Size.pairs, help="training pairs")
    parser.add_argument("--queue", type=int, default=Size.queue, help="training queries in the queues of NCL")
    parser.add_argument("--num_workers", type=int, default=2, help="processes with one thread each")
    parser.add_argument("--small", action="store_true", help="two seeds, few pairs, control and strongest factor only")
    parser.add_argument("--collect", action="store_true", help="train nothing; write data and page from the records")
    parser.add_argument("--page", action="store_true", help="only write the page from mechanisms.json")
    parser.add_argument("--out", type=Path, help="folder; default: benchmarks/results, or build/mechanisms for a part")
    parser.add_argument(
        "--records", type=Path, default=Path("build/mechanisms.jsonl"), help="records of finished heads"
    )
    args = parser.parse_args()
    size = SMALL if args.small else Size(args.pairs, args.queue, seeds=args.seeds)
    if size.seeds < 2 or args.num_workers < 1:
        parser.error("--seeds must be at least 2, and --num_workers at least 1")
    if size.pairs < size.queue:
        parser.error(f"{size.pairs} training pairs are too few for a queue of {size.queue}. Lower --queue.")
    if size.pairs % (BATCH * COPIES):
        parser.error(f"--pairs must be a multiple of {BATCH * COPIES}, so that batches have the intended negatives")
    part = bool(args.claims or args.small)
    out: Path = args.out or (Path("build/mechanisms") if part else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)
    if not args.page:
        claims = [claim for claim in CLAIMS if claim.key in (args.claims or claim.key)]
        claims = [replace(claim, points=claim.ends) for claim in claims] if args.small else claims
        data = measure(claims, () if part else (*LEAKS, *DEVIATIONS), size, args)
        (out / "mechanisms.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    write_page(json.loads((out / "mechanisms.json").read_text(encoding="utf-8")), out)


if __name__ == "__main__":
    main()
