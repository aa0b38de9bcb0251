"""Share of small faults in the package that the tests catch.

    pip install pytest-cov
    python benchmarks/mutants.py --out build/mutants [--mutants 200] [--seed 0]
    python benchmarks/mutants.py --out build/after --again build/mutants/mutants.jsonl

The suite runs once under coverage, which notes the tests that reach each line. Then one sampled place of the package at
a time is changed (a comparison or a sign flipped, a number off by one, an argument dropped, a condition negated), and
the tests that reach it run until one fails. All of this happens in copies of the last commit, two mutants at a time.
Every result is appended to mutants.jsonl, so that a killed run continues; the summary is printed at the end. `--again`
takes the mutants of an earlier run, so that two suites are compared on the same faults.

mutmut and cosmic-ray do not select the tests of a line among those of a whole suite, which takes minutes here.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import queue
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

ROOT = Path(__file__).parents[1]
PACKAGES = ("methods", "pairwise", "evaluation", "data", "media", "store", "training", "runs")
WORKERS = 2
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


def tests_of_lines(database: Path, copied: Path) -> dict[str, dict[int, list[str]]]:
    """Return for each file and line the tests that reach it, those that reach the fewest lines of the package first.

    A fixture runs in the first test that uses it, so for a line that a fixture reaches, the whole test file runs.
    """
    from coverage.numbits import numbits_to_nums

    with sqlite3.connect(database) as found:
        rows = found.execute(
            "select path, context, numbits from line_bits join file on file.id = file_id "
            "join context on context.id = context_id where context like '%|run' or context like '%|setup'"
        ).fetchall()
    reached: dict[str, int] = {}
    of_lines: dict[str, dict[int, list[str]]] = {}
    for path, context, bits in rows:
        test, _, phase = context.rpartition("|")
        test, lines = test if phase == "run" else test.partition("::")[0], numbits_to_nums(bits)
        reached[test] = reached.get(test, 0) + len(lines)
        for line in lines:
            of_lines.setdefault(str(Path(path).relative_to(copied)), {}).setdefault(line, []).append(test)
    return {
        path: {
            line: sorted(set(tests), key=lambda test: ("::" not in test, reached[test], test))
            for line, tests in lines.items()
        }
        for path, lines in of_lines.items()
    }


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def run_tests(copied: Path, words: list[str], seconds: float | None = None) -> int:
    """Run pytest on the copy and return its exit status; tests that do not end count as failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            command, cwd=copied, env=environment, timeout=seconds, capture_output=seconds is not None, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the copy, the coverage, and the results")
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="mutants.jsonl of an earlier run, whose mutants are tested")
    options = parser.parse_args()
    out = options.out.absolute()
    database, results = out / "coverage.sqlite", out / "mutants.jsonl"
    copies = [out / f"copy{number}" for number in range(WORKERS)]
    for copied in copies:
        if not copied.exists():
            subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(copied), "HEAD"], check=True)
    if not database.exists():
        # A forked child that is killed while it writes to its parent's database would damage it.
        (copies[0] / ".coveragerc").write_text("[run]\npatch = fork\n", encoding="utf-8")
        covered = ["--cov=tvr_lightning", "--cov-context=test", "--cov-report="]
        run_tests(copies[0], ["-n", str(WORKERS), "--dist", "loadfile", *covered])
        (copies[0] / ".coverage").rename(database)
    tests = tests_of_lines(database, copies[0])
    files = [path for package in PACKAGES for path in sorted((copies[0] / "tvr_lightning" / package).rglob("*.py"))]
    mutants = [
        Mutant(str(path.relative_to(copies[0])), node, kind, changed)
        for path in files
        for node, kind, changed in places(path.read_text(encoding="utf-8"))
    ]
    if options.again:
        found = [same_mutant(record, mutants) for record in read(options.again)]
        sample = [mutant for mutant in found if mutant]
        print(f"{len(sample)} of the {len(found)} mutants of {options.again} are still in the code")
    else:
        reached = [mutant for mutant in mutants if mutant.node.lineno in tests.get(mutant.file, {})]
        sample = random.Random(options.seed).sample(reached, min(options.mutants, len(reached)))
    done = [tuple(record.values())[:6] for record in read(results)]
    free = queue.SimpleQueue[Path]()
    for copied in copies:
        free.put(copied)

    def test(mutant: Mutant) -> dict[str, object]:
        copied, began = free.get(), time.monotonic()
        reaching = tests.get(mutant.file, {}).get(mutant.node.lineno, [])
        path = copied / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(replaced(source, mutant.node, mutant.changed), encoding="utf-8")
        try:
            caught = bool(reaching) and run_tests(copied, ["-x", "-n", "0", *reaching[:MOST_TESTS]], MOST_SECONDS) != 0
        finally:
            path.write_text(source, encoding="utf-8")
            free.put(copied)
        seconds = round(time.monotonic() - began, 1)
        return {**mutant.record(), "caught": caught, "tests": len(reaching), "seconds": seconds}

    left = [mutant for mutant in sample if tuple(mutant.record().values()) not in done]
    with ThreadPoolExecutor(WORKERS) as pool, results.open("a", encoding="utf-8") as file:
        for record in track(pool.map(test, left), "testing mutants", total=len(left)):
            print(json.dumps(record), file=file, flush=True)
    records = read(results)
    for package in PACKAGES:
        of_package = [record["caught"] for record in records if f"/{package}/" in record["file"]]
        print(f"{package}: caught {sum(of_package)} of {len(of_package)}")
    print(f"caught {sum(record['caught'] for record in records)} of {len(records)}; those that survived:")
    for record in records:
        if not record["caught"]:
            print(f"{record['file']}:{record['line']}: {record['before']} -> {record['after']}")


if __name__ == "__main__":
    main()
