"""The package reads in one direction: a room imports only from rooms to its left; docs/architecture.md lists them."""

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
    """Rooms that a file imports anywhere in it, functions included."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("tvr_lightning.")}
    return rooms


def test_rooms_import_only_from_rooms_to_their_left():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in FLOW, f"{path.name} belongs to no room; add it to the flow"
        wrong += [
            f"{path.relative_to(PACKAGE)} imports {other}"
            for other in imports_of(path) - {room}
            if other in FLOW and FLOW.index(other) > FLOW.index(room)
        ]
    assert not wrong


def test_every_room_is_found():
    assert {"data", "encoders", "layers", "evaluation", "methods"} <= {p.name for p in PACKAGE.iterdir() if p.is_dir()}


def test_the_page_of_the_rooms_has_all_of_them_in_the_order_of_imports():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    rooms = [name for cell in first_cells for name in re.findall(r"`([\w./]+)`", cell)]
    assert [name.removesuffix(".py").removesuffix("/") for name in rooms] == [r for r in FLOW if not r.startswith("_")]
    assert [name for name in re.findall(r"`([\w/]+(?:\.py|/))`", page) if not exists(name)] == []


def exists(name: str) -> bool:
    """Whether a page's path is there: a paper's files in a paper's folder, all else in the package or beside it."""
    return any((PACKAGE / folder / name).exists() for folder in (".", "..", "methods/gare"))


def test_a_paper_s_equations_know_no_blocks_budgets_or_protocols():
    """Blocks and memory are the business of `PairHead`, protocols that of `method.py`."""
    models = sorted((PACKAGE / "methods").glob("*/model.py"))
    assert models
    refused = (
        "tvr_lightning.pairwise.blocks",
        "tvr_lightning.evaluation",
        "tvr_lightning.methods.tmass.score_as_released",
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
