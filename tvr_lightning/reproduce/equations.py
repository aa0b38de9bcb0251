"""Where each paper's equations stand in the code.

`python -m tvr_lightning.reproduce.equations` writes docs/equations.md from the comments and docstrings of the papers'
folders: `Eq. 7`, `Eqs. 2-6, 8` and `Eqs. 37 to 40` name what the line or function is about.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvr_lightning.methods

METHODS = Path(tvr_lightning.methods.__file__).parent
ONE = r"(?:[A-Z]\.)?\d+"
NUMBERS = rf"{ONE}(?:(?:-| to |, | and ){ONE})*"
CITED = re.compile(rf"\bEqs?\. ({NUMBERS})")
SWITCHES = "options.py"
"""Names equations that options change, but computes none."""


@dataclass(frozen=True)
class Place:
    """Where an equation is computed.

    Attributes:
        number: of the equation, as the paper prints it.
        file: below the folder of the methods.
        line: where the equation is named, from 1.
        within: class and function around that line; empty at the top of the file.
    """

    number: str
    file: str
    line: int
    within: str


def places(paper: Path) -> list[Place]:
    """Return where a paper's equations are named, by their numbers.

    Args:
        paper: folder of the paper.
    """
    found = []
    for path in sorted(paper.glob("*.py"), key=lambda path: (path.name != "model.py", path.name)):
        if path.name == SWITCHES:
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        for line, number in _cited(text, _prose(tree)):
            found.append(Place(number, f"{paper.name}/{path.name}", line, _around(tree, line)))
    return sorted(found, key=lambda place: _order(place.number))


def _prose(tree: ast.Module) -> int:
    """Return the last line of the file's docstring, which tells of the paper and computes nothing."""
    first = tree.body[0] if tree.body else None
    told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.end_lineno or 0 if first is not None and told else 0


def _cited(text: str, skip: int) -> Iterator[tuple[int, str]]:
    for line, words in enumerate(text.splitlines(), 1):
        if line <= skip:
            continue
        for cited in CITED.finditer(words):
            for number in _numbers(cited[1]):
                yield line, number


def _numbers(cited: str) -> Iterator[str]:
    for part in re.split(r", | and ", cited):
        first, *last = re.split(r"-| to ", part)
        if not last or "." in first:
            yield part
        else:
            yield from map(str, range(int(first), int(last[0]) + 1))


def _around(tree: ast.Module, line: int) -> str:
    names = []
    for node in ast.walk(tree):  # from the outside in
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            names.append(node.name)
    return ".".join(names)


def _order(number: str) -> tuple[str, int]:
    appendix, _, last = number.rpartition(".")
    return appendix, int(last)


def page() -> str:
    """Return the page in markdown."""
    parts = [_HEAD]
    for paper in sorted(path.parent for path in METHODS.glob("*/model.py")):
        tree = ast.parse((paper / "method.py").read_text(encoding="utf-8"))
        title = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
        parts.append(f"## {title}\n\n" + "\n".join(["| equation | where |", "|---|---|", *_rows(places(paper))]))
    return "\n\n".join(parts) + "\n"


def _rows(found: Sequence[Place]) -> Iterator[str]:
    """Yield a row per equation, or per run of equations that stand at the same places."""
    where: dict[str, tuple[str, ...]] = {}
    for place in found:
        name = f"{place.within or place.file}, line {place.line}"
        link = f"[{name}](../tvr_lightning/methods/{place.file}#L{place.line})"
        where[place.number] = tuple(dict.fromkeys((*where.get(place.number, ()), link)))
    for links, group in itertools.groupby(where, key=where.__getitem__):
        numbers = list(group)
        yield f"| {numbers[0]}{f' to {numbers[-1]}' if len(numbers) > 1 else ''} | {'; '.join(links)} |"


_HEAD = """# Equations

Generated from the comments and docstrings of the papers' folders in `tvr_lightning/methods/` by
`python -m tvr_lightning.reproduce.equations`. A paper's `model.py` contains its equations in their order; `method.py`
contains its losses and lists the differences between the paper, the released code, and this code."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page.

    Args:
        arguments: of the command line; its own by default.
    """
    name = "python -m tvr_lightning.reproduce.equations"
    parser = argparse.ArgumentParser(
        prog=name, description="Write the locations of each paper's equations in the code."
    )
    parser.add_argument("--out", type=Path, default=Path("docs/equations.md"))
    parser.parse_args(arguments).out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
