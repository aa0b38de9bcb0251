"""Packages import in one direction, as docs/architecture.md lists them, and load on systems other than Unix."""

import ast
import builtins
import importlib
import pkgutil
import re
import sys
from pathlib import Path

from child_processes import fork

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


UNIX = {"crypt", "fcntl", "grp", "posix", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty"}


def load_without_unix():
    """Import every module of the package again, as if Python had none of the modules for Unix."""
    for name in [name for name in sys.modules if name.startswith("tvr_lightning.")]:
        del sys.modules[name]
    real = builtins.__import__

    def without_unix(name, globals=None, *rest, **named):
        if name in UNIX and (globals or {}).get("__name__", "").startswith("tvr_lightning"):
            raise ImportError(f"no module {name}")
        return real(name, globals, *rest, **named)

    builtins.__import__ = without_unix
    names = [module.name for module in pkgutil.walk_packages(tvr_lightning.__path__, "tvr_lightning.")]
    for name in names:
        importlib.import_module(name)
    assert len(names) > 100, names
    from tvr_lightning.reproduce.runs.card import peak_memory_mib

    assert peak_memory_mib() is None


def test_every_module_loads_without_modules_for_unix(ended):
    process = ended(fork(load_without_unix))
    process.join(300)
    assert process.exitcode == 0
