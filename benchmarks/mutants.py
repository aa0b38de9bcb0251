"""Share of small faults in the package that the tests catch.

    pip install pytest-cov
    python benchmarks/mutants.py --out build/mutants [--mutants 200] [--seed 0]

The suite runs once under coverage, which notes the tests that reach each line. Then one sampled place of the package at
a time is changed (a comparison or a sign flipped, a number off by one, an argument dropped, a condition negated), and
the tests that reach it run until one fails. All of this happens in a copy of the last commit. Every result is appended
to mutants.jsonl, so that a killed run continues; the summary is printed at the end.

mutmut and cosmic-ray do not select the tests of a line among those of a whole suite, which takes minutes here.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).parents[1]
PACKAGES = ("methods", "pairwise", "evaluation", "data", "media", "store", "training", "runs")
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
    """Return for each file and line the tests that reach it, those that reach the fewest lines of the package first."""
    from coverage.numbits import numbits_to_nums

    with sqlite3.connect(database) as found:
        rows = found.execute(
            "select path, context, numbits from line_bits join file on file.id = file_id "
            "join context on context.id = context_id where context like '%|run'"
        ).fetchall()
    reached: dict[str, int] = {}
    of_lines: dict[str, dict[int, list[str]]] = {}
    for path, context, bits in rows:
        test, lines = context.removesuffix("|run"), numbits_to_nums(bits)
        reached[test] = reached.get(test, 0) + len(lines)
        for line in lines:
            of_lines.setdefault(str(Path(path).relative_to(copied)), {}).setdefault(line, []).append(test)
    return {
        path: {line: sorted(tests, key=lambda test: (reached[test], test)) for line, tests in lines.items()}
        for path, lines in of_lines.items()
    }


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
    options = parser.parse_args()
    out = options.out.absolute()
    copied, database, results = out / "copy", out / "coverage.sqlite", out / "mutants.jsonl"
    if not copied.exists():
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(copied), "HEAD"], check=True)
    if not database.exists():
        run_tests(
            copied, ["-n", "2", "--dist", "loadfile", "--cov=tvr_lightning", "--cov-context=test", "--cov-report="]
        )
        (copied / ".coverage").rename(database)
    tests = tests_of_lines(database, copied)
    files = [path for package in PACKAGES for path in sorted((copied / "tvr_lightning" / package).rglob("*.py"))]
    candidates = [
        (path, node, kind, changed, of_file[node.lineno])
        for path in files
        if (of_file := tests.get(str(path.relative_to(copied))))
        for node, kind, changed in places(path.read_text(encoding="utf-8"))
        if node.lineno in of_file
    ]
    done = len(results.read_text(encoding="utf-8").splitlines()) if results.exists() else 0
    sample = random.Random(options.seed).sample(candidates, min(options.mutants, len(candidates)))
    for path, node, kind, changed, reaching in track(sample[done:], "testing mutants"):
        source, began = path.read_text(encoding="utf-8"), time.monotonic()
        path.write_text(replaced(source, node, changed), encoding="utf-8")
        try:
            caught = run_tests(copied, ["-x", "-n", "0", *reaching[:MOST_TESTS]], MOST_SECONDS) != 0
        finally:
            path.write_text(source, encoding="utf-8")
        record = {
            "file": str(path.relative_to(copied)), "line": node.lineno, "kind": kind, "caught": caught,
            "before": ast.unparse(node), "after": ast.unparse(changed), "tests": len(reaching),
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    print(f"caught {sum(record['caught'] for record in records)} of {len(records)}; those that survived:")
    for record in records:
        if not record["caught"]:
            print(f"{record['file']}:{record['line']}: {record['before']} -> {record['after']}")


if __name__ == "__main__":
    main()
