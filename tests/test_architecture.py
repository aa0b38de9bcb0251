"""Packages import in one direction, and docs/architecture.md lists them in that order."""

import ast
import re
from pathlib import Path

import tvr_lightning

PACKAGE = Path(tvr_lightning.__file__).parent
FLOW = [
    "_torchvision", "errors", "option_types", "progress", "files", "features", "ranks", "metrics", "media", "store",
    "data", "synthetic", "encoders", "extract", "layers", "pairwise", "training", "evaluation", "methods",
    "config", "audit", "runs", "authors", "reproduce", "search", "api", "testing", "cli",
]  # fmt: skip


def imports_of(path):
    """Names that a file imports from this package, in functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("tvr_lightning.") for name in names if name.startswith("tvr_lightning.")}


def test_packages_import_only_from_earlier_packages():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        assert package in FLOW, f"{path.name} is in no package of FLOW; add it"
        later = FLOW[FLOW.index(package) + 1 :]
        wrong += [f"{path.relative_to(PACKAGE)} imports {n}" for n in imports_of(path) if n.split(".")[0] in later]
    assert not wrong


def test_the_page_lists_the_packages_in_the_order_of_imports():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    packages = [name for cell in first_cells for name in re.findall(r"`([\w.]+?)(?:\.py|/)?`", cell)]
    assert packages == [name for name in FLOW if not name.startswith("_")]
    folders = (PACKAGE, PACKAGE.parent, PACKAGE / "methods" / "gare")
    named = re.findall(r"`([\w/]+(?:\.py|/))`", page)
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
