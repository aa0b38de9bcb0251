"""Does a method do what its paper claims where the factor it addresses is there? `python benchmarks/mechanisms.py`.

Heads are trained from synthetic features (mechanisms_worlds.py), method and baseline from equal seeds on equal data.
Writes mechanisms.md and mechanisms.json; what is in the records file is not run again unless the benchmark changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from mechanisms_arms import DEVIATIONS, EXPERIMENTS, LEAKING, Arm
from mechanisms_page import page, summary
from mechanisms_training import run
from mechanisms_worlds import WORLDS

HERE = Path(__file__).parent
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One head to train: an arm in a world, with its factor or without, from one seed."""

    world: str
    factor: bool
    arm: Arm
    seed: int

    @property
    def key(self) -> tuple[str, bool, str, int]:
        return self.world, self.factor, self.arm.name, self.seed


def jobs(seeds: range, only: set[str]) -> Iterator[Job]:
    """Yield every head to train, once: experiment by experiment, then deviations."""
    seen: set[tuple[str, bool, str, int]] = set()
    for job in (*_experiments(seeds, only), *_deviations(seeds, only)):
        if job.key not in seen:
            seen.add(job.key)
            yield job


def _experiments(seeds: range, only: set[str]) -> Iterator[Job]:
    for experiment in EXPERIMENTS:
        if only and experiment.key not in only:
            continue
        for seed in seeds:
            yield from (Job(experiment.world, True, arm, seed) for arm in experiment.arms)
            yield from (Job(experiment.world, False, arm, seed) for arm in experiment.arms[:2])


def _deviations(seeds: range, only: set[str]) -> Iterator[Job]:
    if only and "deviations" not in only:
        return
    compared = [(world, (arm,)) for _, world, arm in LEAKING]
    compared += [(deviation.world, (deviation.ours, deviation.other)) for deviation in DEVIATIONS]
    for world, arms in compared:
        yield from (Job(world, True, arm, seed) for seed in seeds for arm in arms)


def settings() -> str:
    """Return a fingerprint of what decides the outcomes besides the package: worlds, training and arms."""
    names = ("mechanisms_worlds.py", "mechanisms_training.py", "mechanisms_arms.py")
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in names)).hexdigest()[:16]


def train(key: tuple[str, bool, str, int]) -> Record:
    """Train one head in a process of its own thread; return its record."""
    torch.set_num_threads(1)
    job = next(job for job in jobs(range(key[3], key[3] + 1), set()) if job.key == key)
    start = time.process_time()
    outcome = run(job.arm.build, WORLDS[job.world](job.seed, job.factor), job.seed, released=job.arm.released)
    spent = time.process_time() - start
    return {"world": job.world, "factor": job.factor, "arm": job.arm.name, "seed": job.seed,
            "settings": settings(), "seconds": spent, **asdict(outcome)}  # fmt: skip


def read_records(path: Path) -> list[Record]:
    """Return the records of these very settings; none where there is no file."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["settings"] == settings()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [experiment.key for experiment in EXPERIMENTS] + ["deviations"]
    parser.add_argument("--only", choices=known, nargs="+", default=[], help="experiments to run; all by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="0 writes the page from the records there are")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--records", type=Path, default=Path("build/mechanisms.jsonl"))
    args = parser.parse_args()
    records = read_records(args.records)
    done = {(r["world"], r["factor"], r["arm"], r["seed"]) for r in records}
    missing = [job.key for job in jobs(range(args.seeds), set(args.only)) if job.key not in done]
    if args.workers and missing:
        args.records.parent.mkdir(parents=True, exist_ok=True)
        # Spawned, not forked: torch's threads do not survive a fork.
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool, args.records.open("a") as file:
            for record in pool.imap_unordered(train, missing):
                records.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(f"{len(records)} of {len(done) + len(missing)}: {record['world']}, {record['arm']}", flush=True)
        missing = []
    machine = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    command = "python benchmarks/mechanisms.py" + (f" --only {' '.join(args.only)}" if args.only else "")
    args.out.mkdir(parents=True, exist_ok=True)
    found = summary(records)
    (args.out / "mechanisms.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (args.out / "mechanisms.md").write_text(page(records, found, command, machine, len(missing)), encoding="utf-8")


if __name__ == "__main__":
    main()
