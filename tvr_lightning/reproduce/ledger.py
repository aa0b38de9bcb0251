"""The deviation ledger: what a paper says, what its released code does, what is done here, and what that changes.

`python -m tvr_lightning.reproduce.ledger` writes docs/deviations.md. The first line of a method's docstring titles it.
Below a line `Deviations:`, every item names its topic and says in this order, each where there is something to say,
what the paper says, what the released code does and what is done here:

    - topic: paper ...; released ...; here ....
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvr_lightning.methods
from tvr_lightning.errors import UserError

PACKAGE = Path(tvr_lightning.__file__).parent
PARTS = ("paper", "released", "here")


class LedgerError(UserError, ValueError):
    """A docstring's deviation lacks a part, or a measured effect belongs to none; names both and the form expected."""


@dataclass(frozen=True)
class Deviation:
    """One deviation of one method.

    Attributes:
        topic: what it is about.
        paper: what the paper says; empty where nothing is quoted.
        released: what the released code does; empty where nothing is.
        here: what is done here.
    """

    topic: str
    paper: str
    released: str
    here: str


@dataclass(frozen=True)
class Entry:
    """What the docstring of one method's file records.

    Attributes:
        file: name of the file without its ending or of the folder, such as `tcmgc`.
        title: its first line.
        code: whether there is released code.
        deviations: in the docstring's order.
    """

    file: str
    title: str
    code: bool
    deviations: tuple[Deviation, ...]


def read_deviations(file: str, docstring: str) -> Entry:
    """Read the deviations of a method from its docstring.

    Args:
        file: name of the method's file without its ending, for the entry and for errors.
        docstring: of the file.

    Raises:
        LedgerError: there is no list, or an item has another form.
    """
    title, _, rest = docstring.partition("\n")
    if "\nDeviations:\n" not in docstring:
        raise LedgerError(f"methods/{file}.py: the docstring has no line 'Deviations:' followed by items")
    listed = docstring.split("\nDeviations:\n")[1]
    items = [" ".join(item.split()) for item in re.split(r"^- ", listed, flags=re.MULTILINE) if item.strip()]
    code = "no public code" not in " ".join(rest.split())
    return Entry(file, title.strip().rstrip("."), code, tuple(_item(file, item) for item in items))


def _item(file: str, item: str) -> Deviation:
    topic, colon, said = item.partition(": ")
    found = dict.fromkeys(PARTS, "")
    # A semicolon within a part is no border: only one before the name of a later part is.
    pieces = re.split(r"(?:^|; )(paper|released|here),? ", said)
    names = pieces[1::2]
    if not colon or pieces[0] or "here" not in names or names != [part for part in PARTS if part in names]:
        raise LedgerError(
            f"methods/{file}.py, deviation {item[:60]!r}: expected 'topic: paper ...; released ...; here ....'; paper "
            "or released can be omitted"
        )
    found.update(zip(names, (piece.strip() for piece in pieces[2::2]), strict=True))
    return Deviation(topic, found["paper"], found["released"], found["here"].rstrip("."))


def source(file: str) -> str:
    """Return the file that holds a method's docstring, below the folder of the package."""
    within = PACKAGE / "methods" / file / "method.py"
    return str((within if within.exists() else PACKAGE / "methods" / f"{file}.py").relative_to(PACKAGE.parent))


def files() -> dict[str, str]:
    """Return the file or folder of every method by the name of its class: the papers, which are folders, come first."""
    found = {}
    for name in tvr_lightning.methods.__all__:
        module = getattr(tvr_lightning.methods, name).__module__
        found[name] = module.removeprefix("tvr_lightning.methods.").removesuffix(".method")
    return dict(sorted(found.items(), key=lambda item: (not (PACKAGE / "methods" / item[1]).is_dir(), item[1])))


def entries() -> dict[str, Entry]:
    """Return what the docstrings of all methods' files record, by the names of their classes."""
    found = {}
    for name, file in files().items():
        tree = ast.parse((PACKAGE.parent / source(file)).read_text(encoding="utf-8"))
        found[name] = read_deviations(file, ast.get_docstring(tree) or "")
    return found


def measured_effects(path: Path) -> dict[tuple[str, str], list[str]]:
    """Read what benchmarks/mechanisms.py measured, as sentences by class and topic.

    Args:
        path: of mechanisms.json. Without the file nothing was measured.

    Raises:
        LedgerError: an effect belongs to no deviation of the docstrings.
    """
    if not path.exists():
        return {}
    known = {(name, deviation.topic) for name, entry in entries().items() for deviation in entry.deviations}
    data = json.loads(path.read_text(encoding="utf-8"))
    found: dict[tuple[str, str], list[str]] = {}
    for effect in [*data["leaks"], *data["deviations"]]:
        key = effect["method"], effect["topic"]
        if key not in known:
            raise LedgerError(f"{path}: {key[0]}'s docstring records no deviation {key[1]!r}")
        found.setdefault(key, []).append(_sentence(effect))
    return found


def _sentence(effect: dict[str, Any]) -> str:
    mean, half = effect["mean"], effect["half_width"]
    interval = "" if half is None else f" [{mean - half:+.1f}, {mean + half:+.1f}]"
    seeds = "1 seed" if effect["seeds"] == 1 else f"{effect['seeds']} seeds"
    return f"{effect['name']}: {mean:+.1f}{interval}, {effect['world']}, {seeds}"


def recipe_variants(recipes: Path, file: str) -> list[tuple[str, str]]:
    """Return the overlays of a method that change its reading: name below the recipes, and what its header says.

    Args:
        recipes: folder of the recipes.
        file: the method's file name without its ending.
    """
    found = []
    for path in sorted((recipes / "variants").glob(f"{file}-*.yaml")):
        header = [line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
        said = " ".join(header).split("Command:")[0]
        found.append((f"variants/{path.name}", re.sub(r"^On top of [^:]*: ", "", said).strip()))
    return found


def recipe_values(recipes: Path, file: str) -> list[tuple[str, str, str]]:
    """Return the recipes' values whose comment quotes both the paper and the released code.

    Args:
        recipes: folder of the recipes.
        file: the method's file name without its ending.

    Returns:
        Recipe, setting, and comment of each.
    """
    found = []
    for path in sorted([*recipes.glob(f"{file}.yaml"), *recipes.glob(f"{file}-*.yaml")]):
        for line in path.read_text(encoding="utf-8").splitlines():
            setting, mark, comment = line.partition(" # ")
            if mark and setting.strip() and "paper" in comment and "released" in comment:
                found.append((path.name, setting.strip(), comment.strip()))
    return found


def ledger(recipes: Path, effects: Path) -> str:
    """Return the ledger in markdown.

    Args:
        recipes: folder of the recipes.
        effects: mechanisms.json of benchmarks/mechanisms.py.
    """
    measured = measured_effects(effects)
    parts = [_HEAD]
    for name, entry in entries().items():
        parts.append(f"## {entry.title}\n\n`{source(entry.file)}`")
        if not entry.code:
            parts.append("There is no public code.")
        parts.append(_table(entry, {topic: said for (method, topic), said in measured.items() if method == name}))
        values = recipe_values(recipes, entry.file)
        if values:
            lines = [f"- `{recipe}`: `{setting}` ({comment})" for recipe, setting, comment in values]
            parts.append(
                "Values of the recipes that quote both the paper and the released code:\n\n" + "\n".join(lines)
            )
        variants = recipe_variants(recipes, entry.file)
        if variants:
            lines = [f"- `recipes/{name}`: {said}" for name, said in variants]
            parts.append("Overlays:\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _table(entry: Entry, measured: dict[str, list[str]]) -> str:
    lines = ["| what | the paper | the released code | here | measured |", "|---|---|---|---|---|"]
    for deviation in entry.deviations:
        effect = "; ".join(measured.get(deviation.topic, []))
        cells = (deviation.topic, deviation.paper, deviation.released, deviation.here, effect)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


_HEAD = """# Deviations

Generated from the docstrings of `tvr_lightning/methods/` and from the recipes by
`python -m tvr_lightning.reproduce.ledger`; change those, not this page.

"Measured" is text-to-video R@1 of the named variant minus that of this implementation, in points, with the 95 %
interval over seeds, in a controlled synthetic experiment of `benchmarks/mechanisms.py`
(`benchmarks/results/mechanisms.md`). It shows the effect of a deviation on a small head with synthetic features, not
its effect on a published result. Empty: not measured.

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
`recipes/variants/tmass-as-released.yaml`), which marks every result. The "protocol" rows below show how much the leak
adds for the same weights. For T-MASS on MSR-VTT, a third party reports text-to-video R@1 49.4 with the leak and 41.9
without (github.com/patrick-0817/T-MASS-dataleakage); this project has not measured it there."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the ledger.

    Args:
        arguments: of the command line; its own by default.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tvr_lightning.reproduce.ledger", description="Write the list of deviations."
    )
    parser.add_argument("--recipes", type=Path, default=Path("recipes"))
    parser.add_argument("--effects", type=Path, default=Path("benchmarks/results/mechanisms.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/deviations.md"))
    options = parser.parse_args(arguments)
    try:
        options.out.write_text(ledger(options.recipes, options.effects), encoding="utf-8")
    except LedgerError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
