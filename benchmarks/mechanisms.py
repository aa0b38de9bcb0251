"""Try each paper's claim in a world where the factor that it names is there at several strengths, 0 among them.

`python benchmarks/mechanisms.py` trains small heads on made-up features (mechanisms_worlds.py), method and baseline
from equal seeds on equal data. It writes mechanisms.json, and from that mechanisms.md with its figures. Finished heads
are kept: an interrupted run goes on where it was, and a change of one world trains the heads of that world alone. The
page says how much processor time all of them took.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import inspect
import json
import multiprocessing
import os
import platform
import shlex
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import mechanisms_heads
import mechanisms_worlds
import torch
from mechanisms_claims import CLAIMS, DEVIATIONS, LEAKS, Claim, Deviation, Job
from mechanisms_heads import STEPS, outcome
from mechanisms_page import summary, write_page
from mechanisms_worlds import WORLDS

HERE = Path(__file__).parent
SETTINGS = ("mechanisms_worlds.py", "mechanisms_heads.py", "mechanisms_claims.py")
Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is to be trained and written.

    Attributes:
        claims, deviations: those that were asked for; `deviations` with the protocols that leak.
        seeds: how many.
        steps: of every training.
    """

    claims: tuple[Claim, ...]
    deviations: tuple[Deviation, ...]
    seeds: int
    steps: int = STEPS

    def jobs(self) -> dict[str, Job]:
        """Return every head once, by its key: claim by claim, then deviations."""
        listed: Iterable[Claim | Deviation] = (*self.claims, *self.deviations)
        jobs = (job for each in listed for seed in range(self.seeds) for job in each.jobs(seed))
        return {key(job, self.steps): job for job in jobs}


def key(job: Job, steps: int = STEPS) -> str:
    """Return a fingerprint of all that decides a head's outcome besides the package and torch."""
    told = f"{job.strength:g} {job.encoder_rate:g} {job.head!r} {job.seed} {steps}"
    return hashlib.sha256(f"{_source(job.world)}{told}".encode()).hexdigest()[:16]


@cache
def _source(world: str) -> str:
    """Return the code that makes and trains a world's heads, without that of the other worlds."""
    source = inspect.getsource(mechanisms_worlds).partition("\nWORLDS: ")[0]
    for make in WORLDS.values():
        source = source.replace(inspect.getsource(make), "")
    return source + inspect.getsource(WORLDS[world]) + inspect.getsource(mechanisms_heads)


def train(task: tuple[str, Job, int]) -> Record:
    """Train one head in a process of one thread; return its record."""
    torch.set_num_threads(1)
    name, job, steps = task
    start = time.process_time()
    found = outcome(job.head, WORLDS[job.world](job.seed, job.strength), job.seed, job.encoder_rate, steps)
    spent = time.process_time() - start
    about = {"world": job.world, "strength": job.strength, "head": type(job.head).__name__, "seed": job.seed}
    return {"key": name, **about, "settings": committed(), "seconds": spent, "readings": found}


def committed() -> str:
    """Return the commit that fixed worlds, heads and claims; says so where they were changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments, "--", *SETTINGS), cwd=HERE, capture_output=True, text=True
        ).stdout.strip()

    commit = git("log", "-1", "--format=%h of %cI")
    return "no commit" if not commit else f"{commit}, changed since" if git("status", "--porcelain") else commit


def read_records(file: Path) -> dict[str, Record]:
    """Return the finished heads by key, and take away a last line that an interrupted run left half written."""
    if not file.exists():
        return {}
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
        print(f"{file}: left out the last line, which an interrupted run did not finish", flush=True)
    return {record["key"]: record for record in map(json.loads, whole.splitlines())}


def run(plan: Plan, file: Path, workers: int) -> dict[str, Record]:
    """Train what has no record yet, and keep every head as soon as it is finished."""
    records, jobs = read_records(file), plan.jobs()
    missing = [(name, job, plan.steps) for name, job in jobs.items() if name not in records]
    print(f"{len(jobs)} heads, of which {len(jobs) - len(missing)} are there", flush=True)
    if missing:
        file.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with file.open("a", encoding="utf-8") as out:
            for count, record in enumerate(_trained(missing, workers), 1):
                records[record["key"]] = record
                out.write(json.dumps(record) + "\n")
                out.flush()
                left = (time.monotonic() - start) / count * (len(missing) - count)
                about = f"{record['world']} {record['strength']:g}, {record['head']}, seed {record['seed']}"
                print(f"{count} of {len(missing)}: {about}; {timedelta(seconds=round(left))} left", flush=True)
    return {name: records[name] for name in jobs}


def _trained(tasks: list[tuple[str, Job, int]], workers: int) -> Iterator[Record]:
    if workers == 1:
        yield from map(train, tasks)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(workers, _leave_with_parent) as pool:
        yield from pool.imap_unordered(train, tasks)


def _leave_with_parent() -> None:
    """Let a worker end with the run: a killed parent closes nothing that a waiting worker would notice."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def quick(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return claims at their control and at the point of the verdict alone."""
    return tuple(replace(claim, points=(0, claim.verdict_at)) for claim in claims)


def chosen(wanted: list[str] | None, known: Iterable[str], kind: str, parser: argparse.ArgumentParser) -> set[str]:
    """Return the names that were asked for, or all; end with a sentence where one is unknown."""
    listed = list(dict.fromkeys(known))
    for name in wanted or []:
        if name not in listed:
            near = difflib.get_close_matches(name, listed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            parser.error(f"there is no {kind} {name!r}{hint} There are: {', '.join(map(repr, listed))}")
    return set(wanted or listed)


def planned(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Plan:
    """Return what the command line asks for."""
    if args.seeds < 2:
        parser.error(f"--seeds is {args.seeds}; an interval takes at least 2")
    if args.num_workers < 1:
        parser.error(f"--num_workers is {args.num_workers}; training takes at least 1")
    keys = chosen(args.claims, (claim.key for claim in CLAIMS), "claim", parser)
    worlds = chosen(args.worlds, WORLDS, "world", parser)
    arms = chosen(args.arms, (arm.name for claim in CLAIMS for arm in claim.arms), "arm", parser)
    claims = []
    for claim in CLAIMS:
        baseline, *others = claim.arms
        kept = [arm for arm in others if arm.name in arms]
        if claim.key in keys and claim.world in worlds and (kept or baseline.name in arms):
            claims.append(replace(claim, arms=(baseline, *(kept or others[:1]))))
    if not claims:
        parser.error("nothing is left of claims, worlds and arms: none of these arms is tried in these worlds")
    partial = bool(args.claims or args.worlds or args.arms)
    deviations = () if partial or args.quick else (*LEAKS, *DEVIATIONS)
    if args.quick:
        return Plan(quick(claims), deviations, args.seeds, STEPS // 4)
    return Plan(tuple(claims), deviations, args.seeds)


def command(args: argparse.Namespace) -> str:
    """Return the command line that trains what was asked for."""
    names = (("--claims", args.claims), ("--worlds", args.worlds), ("--arms", args.arms))
    said = "".join(f" {option} {shlex.join(value)}" for option, value in names if value)
    seeds = f" --seeds {args.seeds}" if args.seeds != (2 if args.quick else 5) else ""
    return f"python benchmarks/mechanisms.py{' --quick' * args.quick}{said}{seeds}"


def collected(plan: Plan, records: dict[str, Record], said: str) -> Record:
    """Return the data of the page: what every claim and deviation adds up to whose heads are all there.

    Args:
        plan: what was asked for.
        records: of finished heads by key, perhaps of others too.
        said: the command line.
    """

    def whole(each: Claim | Deviation) -> bool:
        return all(key(job, plan.steps) in records for seed in range(plan.seeds) for job in each.jobs(seed))

    claims, deviations = (tuple(filter(whole, listed)) for listed in (plan.claims, plan.deviations))
    used = replace(plan, claims=claims, deviations=deviations).jobs()
    found = summary(claims, deviations, plan.seeds, lambda job: records[key(job, plan.steps)]["readings"])
    missing = [each.key for each in plan.claims if each not in claims]
    missing += [f"{each.method}, {each.topic}" for each in plan.deviations if each not in deviations]
    about = {
        "command": said,
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "settings": sorted({records[name]["settings"] for name in used}),
        "heads": len(used),
        "minutes": sum(records[name]["seconds"] for name in used) / 60,
        "seeds": plan.seeds,
        "steps": plan.steps,
        "missing": missing,
    }
    return {"about": about, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", nargs="+", metavar="CLAIM", help="only these")
    parser.add_argument("--worlds", nargs="+", metavar="WORLD", help="only claims in these worlds")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these arms, each with its baseline")
    parser.add_argument("--seeds", type=int, help="5 by default, 2 with --quick")
    parser.add_argument("--num_workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument(
        "--quick", action="store_true", help="two points, two seeds, a quarter of the steps: two minutes"
    )
    parser.add_argument("--finished", action="store_true", help="train nothing: write what is finished, name the rest")
    parser.add_argument("--page", action="store_true", help="train nothing: write the page from the JSON again")
    parser.add_argument(
        "--out", type=Path, help="folder of page, JSON and figures; a part or --quick: build/mechanisms"
    )
    parser.add_argument("--records", type=Path, default=Path("build/mechanisms.jsonl"), help="finished heads")
    args = parser.parse_args()
    args.seeds = args.seeds if args.seeds is not None else 2 if args.quick else 5
    plan = planned(args, parser)
    whole = len(plan.claims) == len(CLAIMS) and not args.quick and not args.arms
    out: Path = args.out or (HERE / "results" if whole or args.page else Path("build/mechanisms"))
    out.mkdir(parents=True, exist_ok=True)
    if not args.page:
        records = read_records(args.records) if args.finished else run(plan, args.records, args.num_workers)
        data = collected(plan, records, command(args))
        (out / "mechanisms.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    write_page(json.loads((out / "mechanisms.json").read_text(encoding="utf-8")), out)


if __name__ == "__main__":
    main()
