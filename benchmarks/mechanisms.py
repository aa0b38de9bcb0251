"""Test each paper's claim on synthetic features that contain the factor it names at several strengths, including 0.

Each arm of a claim (mechanisms_claims.py) chooses a learning rate and a number of steps on validation pairs, and is
then trained with five seeds. The script writes mechanisms.json and, from it, mechanisms.md with figures. Records of
finished heads are kept, so an interrupted run resumes. If the code of an experiment or of the training changes, its
heads are trained again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import platform
import subprocess
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import mechanisms_heads
import mechanisms_worlds
import torch
from mechanisms_claims import CLAIMS, DEVIATIONS, LEAKS, SETTINGS, Arm, Job, Trial
from mechanisms_heads import TEXT_TO_VIDEO, outcome
from mechanisms_page import summary, write_page
from mechanisms_worlds import WORLDS, make_world

from tvr_lightning.progress import clock

HERE = Path(__file__).parent
COMMITTED = ("mechanisms_worlds.py", "mechanisms_heads.py", "mechanisms_claims.py")
QUICK = ((1e-3, 16),)
Record = dict[str, Any]
Settings = Sequence[tuple[float, int]]


def key(job: Job) -> str:
    """Return a fingerprint of everything that determines the outcome of a head, except the package and torch."""
    return hashlib.sha256(f"{_source(job.world)}{job!r}".encode()).hexdigest()[:16]


@cache
def _source(world: str) -> str:
    """Return the code that determines the data and the training of a world, without the other worlds."""
    source = inspect.getsource(mechanisms_worlds)
    for name, make in WORLDS.items():
        if not (name.startswith(world) or world.startswith(name)):  # some worlds extend another one
            source = source.replace(inspect.getsource(make), "")
    return source + inspect.getsource(mechanisms_heads)


def train(job: Job) -> Record:
    """Train one head with one thread, and return its record."""
    torch.set_num_threads(1)
    start = time.process_time()
    world = make_world(job.world, job.seed, job.strength)
    found = outcome(job.head, world, job.seed, job.rate, job.ratio, job.steps)
    about = {"key": key(job), **vars(job), "head": repr(job.head), "settings": committed()}
    return {**about, "seconds": time.process_time() - start, **found}


def committed() -> str:
    """Return the commit of the worlds, heads, and claims, and whether they have changed since then."""

    def git(*arguments: str) -> str:
        words = ("git", *arguments, "--", *COMMITTED)
        return subprocess.run(words, cwd=HERE, capture_output=True, text=True).stdout.strip()

    commit = git("log", "-1", "--format=%h of %cI") or "no commit"
    return f"{commit}, changed since" if git("status", "--porcelain") else commit


def read_records(file: Path) -> dict[str, Record]:
    """Return the finished heads by key, and remove a last line that an interrupted run left incomplete."""
    if not file.exists():
        return {}
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
        print(f"{file}: removed the incomplete last line of an interrupted run", flush=True)
    return {record["key"]: record for record in map(json.loads, whole.splitlines())}


def run(jobs: Iterable[Job], what: str, file: Path, workers: int) -> dict[str, Record]:
    """Train the heads that have no record, and append the record of each as soon as it is finished."""
    records, wanted = read_records(file), {key(job): job for job in jobs}
    missing = [job for name, job in wanted.items() if name not in records]
    print(f"{what}: {len(wanted)} heads, {len(wanted) - len(missing)} of them finished", flush=True)
    if missing:
        file.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        # Spawned, because torch's threads do not survive a fork.
        pool = multiprocessing.get_context("spawn").Pool(workers, _end_with_parent)
        with pool, file.open("a", encoding="utf-8") as out:
            for count, record in enumerate(pool.imap_unordered(train, missing), 1):
                records[record["key"]] = record
                out.write(json.dumps(record) + "\n")
                out.flush()
                left = (time.monotonic() - start) / count * (len(missing) - count)
                print(f"{count} of {len(missing)}: {record['world']}, {clock(left)} left", flush=True)
    return {name: records[name] for name in wanted}


def _end_with_parent() -> None:
    """End a worker when its parent ends; a waiting worker does not notice that its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def chosen(trial: Trial, arm: Arm, point: float, settings: Settings, found: dict[str, Record]) -> Job:
    """Return the job with seed 0 and the best text-to-video R@1 on the validation pairs, for an arm at a point."""
    jobs = [trial.job(arm, point if point in trial.ends else trial.points[-1], 0, setting) for setting in settings]
    return max(jobs, key=lambda job: found[key(job)]["validation"][arm.reading][TEXT_TO_VIDEO])


def measure(claims: Sequence[Trial], deviations: Sequence[Trial], settings: Settings, args: Namespace) -> Record:
    """Choose the settings, train all heads with them, and return the data for the page."""
    trials = [*claims, *deviations]
    found = run((job for trial in trials for job in trial.sweep(settings)), "choosing", args.records, args.num_workers)

    def heads(trial: Trial, arm: Arm) -> list[list[Job]]:
        """Return the jobs of an arm by point and seed."""
        best = [(point, chosen(trial, arm, point, settings, found)) for point in trial.points]
        return [[trial.job(arm, p, seed, (job.rate, job.steps)) for seed in range(args.seeds)] for p, job in best]

    jobs = (job for trial in trials for arm in trial.arms for same in heads(trial, arm) for job in same)
    found |= run(jobs, "seeds", args.records, args.num_workers)

    def measured(trial: Trial, arm: Arm) -> Record:
        made, swept = heads(trial, arm), [trial.job(arm, trial.points[-1], 0, setting) for setting in settings]
        return {
            "name": arm.name,
            "settings": [(jobs[0].rate, jobs[0].steps) for jobs in made],
            "runs": [[found[key(job)]["test"][arm.reading] for job in jobs] for jobs in made],
            "sweep": [found[key(job)]["validation"][arm.reading][TEXT_TO_VIDEO] for job in swept],
        }

    def described(trial: Trial) -> Record:
        named = {name: getattr(trial, name) for name in ("key", "paper", "says", "world", "ratio", "points")}
        return {**named, "swept": settings, "arms": [measured(trial, arm) for arm in trial.arms]}

    about = {
        "command": f"python benchmarks/mechanisms.py{' --quick' * args.quick}",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "commits": sorted({record["settings"] for record in found.values()}),
        "heads": len(found),
        "minutes": sum(record["seconds"] for record in found.values()) / 60,
        "seeds": args.seeds,
        "settings": settings,
    }
    return {"about": about, **summary([*map(described, claims)], [*map(described, deviations)], len(LEAKS))}


def main() -> None:
    """Train, write the data, and write the page."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--claims", nargs="+", choices=[claim.key for claim in CLAIMS], help="only these claims")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--num_workers", type=int, default=2, help="processes with one thread each")
    parser.add_argument("--quick", action="store_true", help="one setting of 16 steps, first and last strength only")
    parser.add_argument("--page", action="store_true", help="only write the page from mechanisms.json")
    parser.add_argument("--out", type=Path, help="folder; default: benchmarks/results, or build/mechanisms for a part")
    parser.add_argument(
        "--records", type=Path, default=Path("build/mechanisms.jsonl"), help="records of finished heads"
    )
    args = parser.parse_args()
    if args.seeds < 2 or args.num_workers < 1:
        parser.error("--seeds must be at least 2, and --num_workers at least 1")
    part = bool(args.claims or args.quick)
    out: Path = args.out or (Path("build/mechanisms") if part else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)
    if not args.page:
        claims = [claim for claim in CLAIMS if claim.key in (args.claims or claim.key)]
        claims = [replace(claim, points=claim.ends) for claim in claims] if args.quick else claims
        data = measure(claims, () if part else (*LEAKS, *DEVIATIONS), QUICK if args.quick else SETTINGS, args)
        (out / "mechanisms.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    write_page(json.loads((out / "mechanisms.json").read_text(encoding="utf-8")), out)


if __name__ == "__main__":
    main()
