"""Packages import in one direction, and docs/architecture.md lists them in that order."""

import ast
import re
from pathlib import Path

import tvr_lightning

PACKAGE = Path(tvr_lightning.__file__).parent
FLOW = [
    "_torchvision", "errors", "option_types", "progress", "files", "features", "media",
    "store", "data", "synthetic", "encoders", "extract", "layers", "pairwise", "training", "evaluation", "methods",
    "config", "audit", "runs", "authors", "reproduce", "search", "api", "testing", "cli",
]  # fmt: skip


def imports_of(path: Path) -> set[str]:
    """Names of the packages that a file imports, in functions too."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        packages |= {name.split(".")[1] for name in names if name.startswith("tvr_lightning.")}
    return packages


def test_packages_import_only_from_earlier_ones():
    assert {"data", "layers", "evaluation"} <= {path.name for path in PACKAGE.iterdir()}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        assert package in FLOW, f"{path.name} belongs to no package; add it to FLOW"
        wrong += [
            f"{path.relative_to(PACKAGE)} imports {other}"
            for other in imports_of(path) - {package}
            if other in FLOW and FLOW.index(other) > FLOW.index(package)
        ]
    assert not wrong


def test_the_page_lists_the_packages_in_the_order_of_imports():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    packages = [name for cell in first_cells for name in re.findall(r"`([\w./]+)`", cell)]
    assert [name.removesuffix(".py").removesuffix("/") for name in packages] == [
        r for r in FLOW if not r.startswith("_")
    ]
    folders = (PACKAGE, PACKAGE.parent, PACKAGE / "methods" / "gare")
    named = re.findall(r"`([\w/]+(?:\.py|/))`", page)
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def test_a_paper_s_equations_contain_no_blocks_budgets_or_protocols():
    """`PairHead` handles blocks and memory, `method.py` protocols."""
    models = sorted((PACKAGE / "methods").glob("*/model.py"))
    assert models
    refused = tuple(
        f"tvr_lightning.{name}" for name in ("pairwise.blocks", "evaluation", "methods.tmass.score_as_released")
    )
    named = ("score_in_blocks", "block_bytes", "memory_budget", "memory_gib", "Protocol", "as-released")
    for path in models:
        text = path.read_text(encoding="utf-8")
        found = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        assert not [name for name in found if name.startswith(refused)], path
        assert not [name for name in named if name in text], path
