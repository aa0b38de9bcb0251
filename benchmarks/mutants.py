"""Share of small faults in the package that the tests catch.

    pip install coverage
    python benchmarks/mutants.py --out build/mutants [--mutants 300] [--seed 0]
    python benchmarks/mutants.py --out build/after --again build/mutants/mutants.jsonl

Each test file runs once under coverage, which notes the tests that reach each line. Then one sampled place of the
package at a time is changed (a comparison or a sign flipped, a number off by one, an argument dropped, a condition
negated), and the tests that reach it run until one fails. All of this happens in a copy of the last commit, in
processes forked from this one, which has imported the libraries. Every result is stored at once, so that a killed run
continues; the summary is printed at the end. `--again` takes the mutants of an earlier run, so that two suites are
compared on the same faults. Slow tests, tests of other packages, tests that fail without a fault, and lines that only
other processes reach are left out.

mutmut and cosmic-ray do not select the tests of a line among those of a whole suite, which takes minutes here.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.progress import track

ROOT = Path(__file__).parents[1]
PACKAGES = ("methods", "pairwise", "evaluation", "data", "reproduce", "training", "runs")
"""Packages whose results are printed. Their own tests and those of parity are run."""
LIBRARIES = (
    "coverage", "torch", "lightning.pytorch", "torchmetrics", "jsonargparse", "av", "pandas", "scipy.stats",
    "matplotlib.pyplot", "open_clip", "transformers",
)  # fmt: skip
FORKED = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
MOST_TESTS, MOST_SECONDS = 80, 300
"""Limits of the tests of one mutant, those that reach the fewest lines first, and of their time."""
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the faults of one expression: what was changed, and the changed expression."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator, *_]):
            changed.ops[0] = COMPARISONS[type(operator)]()
            yield "comparison", changed
        case ast.BinOp(op=operator) if type(operator) in SIGNS:
            changed.op = SIGNS[type(operator)]()
            yield "sign", changed
        case ast.UnaryOp(op=ast.USub()):
            yield "sign", changed.operand
        case ast.UnaryOp(op=ast.Not()):
            yield "condition", changed.operand
        case ast.Constant(value=bool(value)):
            yield "condition", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "number", ast.Constant(value + 1)
        case ast.Call(keywords=[_, *_]):
            changed.keywords.pop()
            yield "argument", changed
        case ast.BoolOp(op=operator):
            changed.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "condition", changed


@dataclass
class Mutant:
    """One fault: its file, the expression, the kind of the change, and the changed expression."""

    file: str
    node: ast.expr
    kind: str
    changed: ast.AST

    def record(self) -> dict[str, object]:
        change = {"before": ast.unparse(self.node), "after": ast.unparse(self.changed)}
        return {
            "file": self.file,
            "line": self.node.lineno,
            "column": self.node.col_offset,
            "kind": self.kind,
            **change,
        }


def same_mutant(record: dict[str, Any], mutants: list[Mutant]) -> Mutant | None:
    """Return the mutant nearest to an earlier run's record, of the same file and change; None if the code is gone."""
    of_file = [mutant for mutant in mutants if mutant.file == record["file"]]
    names = ("kind", "before", "after")
    same = [mutant for mutant in of_file if all(mutant.record()[name] == record[name] for name in names)]
    return min(same, key=lambda mutant: abs(mutant.node.lineno - record["line"]), default=None)


def places(source: str) -> Iterator[tuple[ast.expr, str, ast.AST]]:
    """Yield every expression of a module's functions that can be changed, except annotations and error messages."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if node in skipped or isinstance(node, (ast.Raise, ast.arg, ast.AnnAssign, ast.JoinedStr)):
            skipped.update(ast.iter_child_nodes(node))
        elif isinstance(node, ast.expr):
            for kind, changed in mutations(node):
                yield node, kind, changed


def replaced(source: str, node: ast.expr, changed: ast.AST) -> str:
    """Return the source with an expression changed."""
    lines = source.encode().splitlines(keepends=True)
    assert node.end_lineno is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    start, end = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    lines[first : last + 1] = [start + f"({ast.unparse(changed)})".encode() + end]
    return b"".join(lines).decode()


class Contexts:
    """Pytest plugin that notes under coverage which test, and whether its fixtures or the test itself, reach a line."""

    def __init__(self, package: Path) -> None:
        import coverage

        # In memory, since a forked child that is killed while it writes to its parent's database would damage it.
        self.failed: set[str] = set()
        self.coverage = coverage.Coverage(data_file=None, source=[str(package)])
        os.register_at_fork(after_in_child=self.coverage.stop)
        self.coverage.start()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note that fixtures begin."""
        self.coverage.switch_context(f"{item.nodeid}|setup")

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Note that the test begins."""
        self.coverage.switch_context(f"{item.nodeid}|run")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that fails without a fault."""
        if report.failed:
            self.failed.add(report.nodeid)

    def lines(self, copied: Path) -> dict[str, dict[int, list[str]]]:
        """Return the contexts of each file and line."""
        self.coverage.stop()
        data = self.coverage.get_data()
        return {
            str(Path(file).relative_to(copied)): {
                line: [context for context in contexts if context.rpartition("|")[0] not in self.failed]
                for line, contexts in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }


def cover(copied: Path, test: str, out: Path) -> int:
    """Run a test file, and write the contexts of each line that it reaches."""
    found = Contexts(copied / "tvr_lightning")
    status = pytest.main([*FORKED, test], plugins=[found])
    part = out.with_suffix(".part")
    part.write_text(json.dumps(found.lines(copied)), encoding="utf-8")
    part.rename(out)
    return status


def tests_of_lines(folder: Path) -> dict[str, dict[int, list[str]]]:
    """Return for each file and line the tests that reach it, those that reach the fewest lines of the package first.

    A fixture runs in the first test that uses it, so for a line that a fixture reaches, the whole test file runs.
    """
    reached: dict[str, int] = {}
    of_lines: dict[str, dict[int, set[str]]] = {}
    for file in sorted(folder.glob("*.json")):
        for path, lines in json.loads(file.read_text(encoding="utf-8")).items():
            for line, contexts in lines.items():
                for context in filter(None, contexts):
                    test, _, phase = context.rpartition("|")
                    test = test if phase == "run" else test.partition("::")[0]
                    reached[test] = reached.get(test, 0) + 1
                    of_lines.setdefault(path, {}).setdefault(int(line), set()).add(test)
    return {
        path: {
            line: sorted(tests, key=lambda test: ("::" not in test, reached[test], test))
            for line, tests in lines.items()
        }
        for path, lines in of_lines.items()
    }


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def start(copied: Path, work: Callable[[], int]) -> int:
    """Run a function in a forked process that imports the package from a copy, and return the number of the process."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        os.chdir(copied)
        sys.path.insert(0, str(copied))
        os.environ |= {"PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(copied.with_name("last.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = work()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_tests(copied: Path, work: Callable[[], int], seconds: float) -> int:
    """Run a function as `start` does, and return its exit status; one that does not end in time counts as failed."""
    child, end = start(copied, work), time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the copy, the coverage, and the results")
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="mutants.jsonl of an earlier run, whose mutants are tested")
    options = parser.parse_args()
    out = options.out.absolute()
    results, copied, covered = out / "mutants.jsonl", out / "copy", out / "coverage"
    covered.mkdir(parents=True, exist_ok=True)
    if not copied.exists():
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(copied), "HEAD"], check=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    for library in ("tvr_lightning", *LIBRARIES):  # the first makes torchvision work
        importlib.import_module(library)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tvr_lightning"]:
        del sys.modules[name]

    folders = [copied / "tests" / name for name in ("parity", *PACKAGES)]
    for test in track([test for folder in folders for test in sorted(folder.rglob("test_*.py"))], "coverage"):
        name = str(test.relative_to(copied))
        found = covered / f"{name.replace('/', '.')}.json"
        if not found.exists() and run_tests(copied, lambda name=name, found=found: cover(copied, name, found), 1200):
            print(f"{name}: failed or did not end", flush=True)
    tests = tests_of_lines(covered)
    files = [path for package in PACKAGES for path in sorted((copied / "tvr_lightning" / package).rglob("*.py"))]
    mutants = [
        Mutant(str(path.relative_to(copied)), node, kind, changed)
        for path in files
        for node, kind, changed in places(path.read_text(encoding="utf-8"))
    ]
    if options.again:
        nearest = [same_mutant(record, mutants) for record in read(options.again)]
        sample = [mutant for mutant in nearest if mutant]
        print(f"{len(sample)} of the {len(nearest)} mutants of {options.again} are still in the code")
    else:
        reached = [mutant for mutant in mutants if mutant.node.lineno in tests.get(mutant.file, {})]
        sample = random.Random(options.seed).sample(reached, min(options.mutants, len(reached)))
    done = [tuple(record.values())[:6] for record in read(results)]
    left = [mutant for mutant in sample if tuple(mutant.record().values()) not in done]
    with results.open("a", encoding="utf-8") as file:
        for mutant in track(left, "testing mutants"):
            print(json.dumps(tested(mutant, copied, tests)), file=file, flush=True)
    report(read(results))


def tested(mutant: Mutant, copied: Path, tests: dict[str, dict[int, list[str]]]) -> dict[str, object]:
    """Change the copy, run the tests that reach the place until one fails, and undo the change."""
    began, path = time.monotonic(), copied / mutant.file
    reaching = tests.get(mutant.file, {}).get(mutant.node.lineno, [])
    source = path.read_text(encoding="utf-8")
    path.write_text(replaced(source, mutant.node, mutant.changed), encoding="utf-8")
    try:
        words = ["-x", *FORKED, *reaching[:MOST_TESTS]]
        caught = bool(reaching) and run_tests(copied, lambda: pytest.main(words), MOST_SECONDS) != 0
    finally:
        path.write_text(source, encoding="utf-8")
    seconds = round(time.monotonic() - began, 1)
    return {**mutant.record(), "caught": caught, "tests": len(reaching), "seconds": seconds}


def report(records: list[dict[str, Any]]) -> None:
    """Print how many mutants of each package were caught, and those that survived."""
    for package in PACKAGES:
        of_package = [record["caught"] for record in records if f"/{package}/" in record["file"]]
        print(f"{package}: caught {sum(of_package)} of {len(of_package)}")
    print(f"caught {sum(record['caught'] for record in records)} of {len(records)}; those that survived:")
    for record in records:
        if not record["caught"]:
            print(f"{record['file']}:{record['line']}: {record['before']} -> {record['after']}")


if __name__ == "__main__":
    main()
