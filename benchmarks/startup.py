"""Startup cost of the command line: help, typos, import, and search, now and at an earlier commit.

    python benchmarks/startup.py [--before COMMIT] > benchmarks/results/startup.md

All values are CPU times, medians of several starts. The starts alternate within one run, so that other load affects all
of them equally. `search` finds one of a few synthetic videos with a tiny model.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHORT = 0.5
"""Starts that take fewer seconds than this are repeated five times as often."""
# Importing tvr_lightning takes a twentieth of a second and declares an operator that is missing if a CPU build of torch
# is installed with a CUDA build of torchvision. Without it, a LightningCLI would fail before it prints anything.
LIGHTNING = (
    "import tvr_lightning\n"
    "from lightning.pytorch.cli import LightningCLI\n"
    "from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel\n"
    "LightningCLI(DemoModel, BoringDataModule, args=['fit', '--help'])"
)
TVR = ["-c", "import sys; from tvr_lightning.cli import main; sys.exit(main(sys.argv[1:]))"]
ALONE = {
    "python -c pass": ["-c", "pass"],
    'python -c "import torch"': ["-c", "import torch"],
    "a bare LightningCLI: fit --help": ["-c", LIGHTNING],
}
BOTH = {
    "import tvr_lightning": ["-c", "import tvr_lightning"],
    "tvr --help": [*TVR, "--help"],
    "tvr fit --help": [*TVR, "fit", "--help"],
    "tvr fit --help_all (all options)": [*TVR, "fit", "--help_all"],
    "tvr index --help": [*TVR, "index", "--help"],
    "tvr search --help": [*TVR, "search", "--help"],
    "tvr search --tpo 3 dog (a typo)": [*TVR, "search", "--tpo", "3", "dog"],
}


def seconds(arguments: list[str], checkout: Path) -> float:
    """Return the CPU seconds of one start of Python, including its child processes."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, *arguments], env=environment, cwd=checkout, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode not in (0, 2):  # 2: the status after a typo
        raise SystemExit(f"{arguments}: {run.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imported(arguments: list[str], checkout: Path) -> str:
    """Return a paragraph about the import time of a search, by package."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-X", "importtime", *arguments]
    report = subprocess.run(words, env=environment, cwd=checkout, capture_output=True, text=True, check=True).stderr
    own: Counter[str] = Counter()
    for time_, module in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)", report):
        own[module.partition(".")[0]] += int(time_)
    whole = sum(own.values())
    parts = ", ".join(f"{name} {100 * time_ / whole:.0f} %" for name, time_ in own.most_common(12))
    return (
        f"A search opens the index with its method, a LightningModule with an open_clip encoder. Import time by "
        f"package (`python -X importtime`): {parts}. Lightning imports torchmetrics, which imports scipy, "
        "matplotlib, transformers, and torchvision; LanceDB imports its namespace client, and open_clip imports timm. "
        "This project cannot avoid these imports. `tvr serve` loads them once."
    )


def make_index(folder: Path) -> Path:
    """Create the index for the search."""
    sys.path.insert(0, str(ROOT))
    from tvr_lightning.cli import main as tvr

    overlay = folder / "tiny.yaml"
    overlay.write_text(
        "trainer: {max_epochs: 1, log_every_n_steps: 1}\n"
        f"data: {{init_args: {{root: {folder}, frames: 4, batch_size: 8, num_workers: 0}}}}\n"
        "model: {init_args: {encoder: {init_args: {width: 64}}}}\n"
    )
    quiet = os.dup(1)
    os.dup2(2, 1)  # only the page goes to the output
    tvr(["data", "synth", "msrvtt", "--root", str(folder), "--videos", "24", "--num_workers", "1"])
    words = ["fit", "--config", "tcmgc", "--config", "fixture", "--config", str(overlay)]
    tvr([*words, "--results.directory", str(folder / "runs")])
    (checkpoint,) = folder.glob("runs/*/version_0/checkpoints/last.ckpt")
    tvr(["index", str(folder / "msrvtt" / "videos"), "--out", str(folder / "index"), "--ckpt_path", str(checkpoint)])
    os.dup2(quiet, 1)
    return folder / "index"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", help="commit to compare with; default: none")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        states = {folder / "now": "HEAD"} | ({folder / "before": options.before} if options.before else {})
        try:
            for state, commit in states.items():  # separate checkouts, so that edits do not matter
                subprocess.run(["git", "worktree", "add", "--detach", state, commit], cwd=ROOT, check=True, stdout=2)
            page(folder, options)
        finally:
            for state in states:
                subprocess.run(["git", "worktree", "remove", "--force", state], cwd=ROOT, stdout=2)


def described(commit: str) -> str:
    """Return a commit and its date."""
    words = ["git", "show", "--no-patch", "--format=%h of %as", commit]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def page(folder: Path, options: argparse.Namespace) -> None:
    """Measure all starts alternately, and print the page."""
    index, now, before, measured = make_index(folder), folder / "now", folder / "before", described("HEAD")
    search = [*TVR, "search", "a red star", "--index", str(index), "--top", "1"]
    starts = {(name, "now"): (words, now) for name, words in {**ALONE, **BOTH, "tvr search": search}.items()}
    if options.before:  # it may not be able to read the current index
        starts |= {(name, "before"): (words, before) for name, words in BOTH.items()}
    taken: dict[tuple[str, str], list[float]] = {start: [] for start in starts}
    for _ in range(options.repeats):
        for start, (words, checkout) in starts.items():
            taken[start].append(seconds(words, checkout))
            if taken[start][-1] < SHORT:
                taken[start] += [seconds(words, checkout) for _ in range(4)]
    median = {start: statistics.median(values) for start, values in taken.items()}
    nothing, torch, lightning = (median[name, "now"] for name in ALONE)
    compared = f"before: {described(options.before)}, " if options.before else ""
    print("# Startup cost of the command line\n")
    print(
        f"`python benchmarks/startup.py{f' --before {options.before}' if options.before else ''}"
        f" --repeats {options.repeats}`, {datetime.date.today()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}. The table shows CPU seconds, medians of "
        f"{options.repeats} starts (of {5 * options.repeats} if a start takes less than {SHORT} s). The starts "
        f"alternated while other work ran; {compared}now: {measured}.\n"
    )
    columns = ["start", *(["before"] if options.before else []), "now"]
    print(f"| {' | '.join(columns)} | now / `pass` | now / `import torch` | now / LightningCLI's help |")
    print("|---" * (len(columns) + 3) + "|")
    for name in [*ALONE, *BOTH, "tvr search"]:
        here, then = median[name, "now"], median.get((name, "before"))
        ratios = " | ".join(f"{here / other:.2f}" for other in (nothing, torch, lightning))
        earlier = [] if not options.before else [" |" if then is None else f" {then:.2f} |"]
        print(f"| {name if name.startswith('a ') else f'`{name}`'} |{''.join(earlier)} {here:.2f} | {ratios} |")
    print(f"\n{imported(search, now)}")


if __name__ == "__main__":
    main()
