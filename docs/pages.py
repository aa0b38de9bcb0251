"""Write docs/deviations.md and docs/equations.md from the code of the methods and from the recipes.

Command: python docs/pages.py

A method's docstring ends with a line `Deviations:` and a list of the differences between the paper, the released code,
and this code. `paper` or `released` may be omitted:

    - topic: paper ...; released ...; here ....

A comment or docstring such as `Eq. 7`, `Eqs. 2-6, 8` or `Eqs. 37 to 40` names the equations that a line or function
computes.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvr_lightning.methods

ROOT = Path(__file__).parent.parent
METHODS = Path(tvr_lightning.methods.__file__).parent
PARTS = ("paper", "released", "here")
NUMBER = r"(?:[A-Z]\.)?\d+"
CITED = re.compile(rf"\bEqs?\. ({NUMBER}(?:(?:-| to |, | and ){NUMBER})*)")

DEVIATIONS = """# Deviations

Generated from the docstrings of `tvr_lightning/methods/` and from the recipes by `python docs/pages.py`; change those,
not this page.

"Measured" is text-to-video R@1 of the named variant minus that of this implementation, in points, with the 95 %
interval over seeds, in a controlled synthetic experiment of `benchmarks/mechanisms.py`
(`benchmarks/results/mechanisms.md`); each has the learning rate that suits it best. It shows the effect on a small head
with synthetic features, not the effect on a published result. Empty: not measured.

## All methods

- Colors: OpenCV 4, with which the released codes read videos, ignores the BT.709 tag of a file, so that the pixels of
  some files differ from those of OpenCV 5. Here frames are converted as the file is tagged.
- Text: without the package ftfy, the Hugging Face tokenizer of X-Pool, T-MASS and GAID gives other token IDs for
  captions with broken characters. Here captions are always cleaned with ftfy, as CLIP's own tokenizer does.
- Cosines: the released codes divide a vector by its length. Here lengths below 1e-8 count as 1e-8, so that a zero
  vector has a cosine of 0 instead of NaN.

## The evaluations that leak

The released evaluations of GAID and T-MASS score every test video under its own caption, so the representation of the
video already depends on the text that is supposed to find it. Their published results are not comparable with others.
Here both require `protocol: as-released` (`recipes/variants/gaid-as-released.yaml`,
`recipes/variants/tmass-as-released.yaml`), which marks every result. The "protocol" rows below show how much higher
R@1 is with the released protocol and the same weights. For T-MASS on MSR-VTT, a third party reports text-to-video R@1
49.4 with the leak and 41.9 without (github.com/patrick-0817/T-MASS-dataleakage); this project has not measured it."""

EQUATIONS = """# Equations

Generated from the comments and docstrings of the papers' folders in `tvr_lightning/methods/` by
`python docs/pages.py`. A paper's `model.py` contains its equations in their order; `method.py` contains its losses and
lists the differences between the paper, the released code, and this code."""


def method_files() -> dict[str, Path]:
    """Return the file with the docstring of each method, by its class; the papers, which are folders, come first.

    TempMe, which is an option of the encoder, comes last.
    """
    found = {}
    for name in tvr_lightning.methods.__all__:
        module = getattr(tvr_lightning.methods, name).__module__
        found[name] = METHODS.joinpath(*module.split(".")[2:]).with_suffix(".py")
    found = dict(sorted(found.items(), key=lambda item: (item[1].parent == METHODS, item[1])))
    return {**found, "TempMe": METHODS.parent / "encoders" / "token_merging.py"}


def docstring(path: Path) -> str:
    """Return the docstring of a file."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def deviations(text: str) -> dict[str, dict[str, str]]:
    """Return the deviations in a method's docstring by topic: behavior of the paper, the released code, and this code.

    Raises:
        ValueError: There is no list, or an item has another form.
    """
    _, heading, listed = text.partition("\nDeviations:\n")
    if not heading:
        raise ValueError("the docstring has no line 'Deviations:' followed by items")
    found = {}
    for item in re.split(r"^- ", listed, flags=re.MULTILINE)[1:]:
        topic, _, rest = " ".join(item.split()).partition(": ")
        # A semicolon also stands within a part: only before the name of a part does it end one.
        before, *pieces = re.split(r"(?:^|; )(paper|released|here),? ", rest)
        names = pieces[::2]
        if before or "here" not in names or names != [part for part in PARTS if part in names]:
            raise ValueError(
                f"deviation {topic[:60]!r}: expected 'topic: paper ...; released ...; here ....'; paper or released "
                "can be omitted"
            )
        found[topic] = dict.fromkeys(PARTS, "") | dict(zip(names, pieces[1::2], strict=True))
        found[topic]["here"] = found[topic]["here"].rstrip(".")
    return found


def effects(measured: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return the effects measured by benchmarks/mechanisms.py as sentences, by class and topic.

    Args:
        measured: Content of mechanisms.json.

    Raises:
        ValueError: An effect belongs to no deviation of the docstrings.
    """
    known = {(name, topic) for name, path in method_files().items() for topic in deviations(docstring(path))}
    found: dict[tuple[str, str], str] = {}
    for effect in [*measured["leaks"], *measured["deviations"]]:
        key, half = (effect["method"], effect["topic"]), effect["half_width"]
        if key not in known:
            raise ValueError(f"the docstring of {key[0]} lists no deviation {key[1]!r}, but its effect was measured")
        interval = "" if half is None else f" [{effect['mean'] - half:+.1f}, {effect['mean'] + half:+.1f}]"
        seeds = f"{effect['seeds']} seed{'s' if effect['seeds'] > 1 else ''}"
        said = f"{effect['name']}: {effect['mean']:+.1f}{interval}, {effect['setting']}, {seeds}"
        found[key] = f"{found[key]}; {said}" if key in found else said
    return found


def deviations_page(measured: dict[str, Any]) -> str:
    """Return docs/deviations.md.

    Args:
        measured: Content of mechanisms.json.
    """
    effect, parts = effects(measured), [DEVIATIONS]
    for name, path in method_files().items():
        text = docstring(path)
        parts.append(f"## {text.splitlines()[0].rstrip('.')}\n\n`{path.relative_to(ROOT)}`")
        if "no public code" in " ".join(text.partition("\nDeviations:\n")[0].split()):
            parts.append("There is no public code.")
        lines = ["| what | the paper | the released code | here | measured |", "|---|---|---|---|---|"]
        for topic, said in deviations(text).items():
            cells = [topic, *said.values(), effect.get((name, topic), "")]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts += [
            f'<details markdown="1"><summary>Deviations ({len(lines) - 2})</summary>',
            "\n".join(lines),
            "</details>",
        ]
        recipe = path.parent.name if path.parent.parent == METHODS else name.lower()
        for heading, items in (
            ("Values of the recipes that quote both the paper and the released code:", recipe_values(recipe)),
            ("Overlays:", overlays(recipe)),
        ):
            if items:
                parts.append("\n".join([f"{heading}\n", *(f"- {item}" for item in items)]))
    return "\n\n".join(parts) + "\n"


def recipe_values(method: str) -> list[str]:
    """Return the settings of a method's recipes whose comment quotes both the paper and the released code."""
    found = []
    for path in sorted([*ROOT.glob(f"recipes/{method}.yaml"), *ROOT.glob(f"recipes/{method}-*.yaml")]):
        for line in path.read_text(encoding="utf-8").splitlines():
            setting, _, comment = line.partition(" # ")
            if setting.strip() and "paper" in comment and "released" in comment:
                found.append(f"`{path.name}`: `{setting.strip()}` ({comment.strip()})")
    return found


def overlays(method: str) -> list[str]:
    """Return the variants of a method's recipe, with what their headers say."""
    found = []
    for path in sorted(ROOT.glob(f"recipes/variants/{method}-*.yaml")):
        header = " ".join(re.findall(r"^# (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))
        said = re.sub(r"^On top of [^:]*: ", "", header.split("Command:")[0]).strip()
        found.append(f"`recipes/variants/{path.name}`: {said}")
    return found


def equations(paper: Path) -> Iterator[tuple[str, str]]:
    """Yield the number of each equation of a paper with a link to a line that computes it, in order of the numbers.

    Args:
        paper: Folder of the paper.
    """
    found = []
    for path in sorted(paper.glob("*.py"), key=lambda path: (path.name != "model.py", path.name)):
        if path.name == "options.py":
            continue  # names equations that options change, but computes none
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        told = tree.body[0].end_lineno or 0 if ast.get_docstring(tree) else 0
        for line, words in enumerate(text.splitlines(), 1):
            for cited in CITED.finditer(words) if line > told else ():
                link = f"[{around(tree, line) or f'{paper.name}/{path.name}'}, line {line}]"
                link += f"(../tvr_lightning/methods/{paper.name}/{path.name}#L{line})"
                found += [(number, link) for number in numbers(cited[1])]
    return iter(sorted(found, key=lambda item: (item[0].rpartition(".")[0], int(item[0].rpartition(".")[2]))))


def numbers(cited: str) -> Iterator[str]:
    """Yield the numbers in a list such as `2-6, 8 and C.1`."""
    for part in re.split(r", | and ", cited):
        first, *last = re.split(r"-| to ", part)
        yield from map(str, range(int(first), int(last[0]) + 1)) if last else [part]


def around(tree: ast.Module, line: int) -> str:
    """Return the names of the class and function around a line, joined by dots."""
    scopes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return ".".join(node.name for node in scopes if node.lineno <= line <= (node.end_lineno or 0))


def equations_page() -> str:
    """Return docs/equations.md: one row for all consecutive equations that are computed in the same lines."""
    parts = [EQUATIONS]
    for path in sorted(METHODS.glob("*/model.py")):
        links: dict[str, list[str]] = {}
        for number, link in equations(path.parent):
            links.setdefault(number, [])
            links[number] += [] if link in links[number] else [link]
        rows = ["| equation | where |", "|---|---|"]
        for where, group in itertools.groupby(links, key=links.__getitem__):
            first, *rest = group
            rows.append(f"| {first}{f' to {rest[-1]}' if rest else ''} | {'; '.join(where)} |")
        title = docstring(path.parent / "method.py").partition("\n")[0].rstrip(".")
        parts.append("\n".join([f"## {title}\n", *rows]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write both pages."""
    measured = json.loads((ROOT / "benchmarks/results/mechanisms.json").read_text(encoding="utf-8"))
    (ROOT / "docs/deviations.md").write_text(deviations_page(measured), encoding="utf-8")
    (ROOT / "docs/equations.md").write_text(equations_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
