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
import tvr_lightning.config.recipe  # imports all classes with options
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.encoders.base import FeatureEncoder
from tvr_lightning.option_types import ConfigVariant, Options, hints_of
from tvr_lightning.training.module import RecipeModule

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


# Words that are also names of options, and options that the file itself declares.
NO_LISTS = {
    "encoders/clip.py": "options of ClipEncoder that its small variant has no use for",
    "runs/closing.py": "modules of a method",
    "training/optim.py": "options of OptimizerConfig that a resumed run may change",
}


def option_names():
    """Names of the options of all methods, encoders, and datasets, and of the classes among these options."""
    kinds, names = [RecipeModule, FeatureEncoder, TextVideoDataModule, Options, ConfigVariant], set()
    for kind in kinds:
        names |= hints_of(kind).keys() if kind.__module__.startswith("tvr_lightning.") else set()
        kinds += kind.__subclasses__()
    return names - {"return"}


def lists_of(names, source):
    """Sets, tuples, and lists of at least three strings, all of them `names`, but for those in annotations."""
    tree = ast.parse(source)
    in_types = {part for node in ast.walk(tree) if isinstance(node, ast.Subscript) for part in ast.walk(node.slice)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Set | ast.Tuple | ast.List) and node not in in_types:
            words = [part.value for part in node.elts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if len(words) >= 3 and names.issuperset(words):
                yield words


def test_no_list_names_the_options_that_something_applies_to():
    """An option's annotation states its role once. A list elsewhere also matches the same name in a user's class."""
    names = option_names()
    assert {"frames", "split", "weights", "schedule", "annotated_end", "temporal_layers", "rank"} <= names
    assert [*lists_of(names, 'A = {"split", "seconds", "features"}\nB: Literal["split", "seconds", "frames"]')] == [
        ["split", "seconds", "features"]
    ]
    found = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    listed = {path: [*lists_of(names, source)] for path, source in found.items()}
    assert {path: lists for path, lists in listed.items() if lists and path not in NO_LISTS} == {}
    assert [path for path in NO_LISTS if not listed[path]] == []
