"""The options of recipes as a JSON schema: made by jsonargparse from the classes, and kept in the user's cache.

`config/check.py` compares recipes with it before torch is imported, and editors complete recipes by it (`tvr schema`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvr_lightning.option_types import schema_of

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

PACKAGE = Path(__file__).parents[1]
LEFT_OUT = (
    "Module", "Metric", "Callback", "Strategy", "Logger", "Precision", "Profiler", "Tensor", "PreTrainedConfig",
)  # fmt: skip
"""Classes of libraries whose options are left to the parser: they would be nine tenths of the schema."""
BASES = ("LightningModule", "RecipeModule", "RestrictedModule")
"""Classes that a recipe cannot choose."""


def cached_schema() -> dict[str, Any] | None:
    """Return the schema of the user's cache if the sources have not changed since, or None."""
    try:
        cached = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # none yet, or no home folder
        return None
    return cached["schema"] if cached["sources"] == SOURCES else None


def keep(schema: dict[str, Any]) -> dict[str, Any]:
    """Write a schema of all sections of recipes to the user's cache, and return it."""
    from tvr_lightning.files import write_whole

    with contextlib.suppress(OSError, RuntimeError):  # without a cache, mistakes are found later, by the parser
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_whole(_file(), json.dumps({"sources": SOURCES, "schema": schema}).encode())
    return schema


def generate(parser: ArgumentParser) -> dict[str, Any]:
    """Return a parser's schema."""
    from jsonargparse._completions_jsonschema import ParserJsonschema  # its public function cannot leave classes out

    class Schema(ParserJsonschema):
        def class_ref(self, class_type: Any, action: Any, subclass: bool) -> dict[str, Any]:
            # jsonargparse 4.53 fails on `type[...]` of a class of abc
            if class_type.__name__ in LEFT_OUT or class_type.__module__ == "abc":
                return {}
            return super().class_ref(class_type, action, subclass)

        def class_path_schema(self, class_path: str, action: Any) -> dict[str, Any]:
            schema = super().class_path_schema(class_path, action)
            schema["properties"]["class_path"] = {"enum": [class_path.rpartition(".")[2], class_path]}
            return schema

        def subclass_def(self, class_type: Any, action: Any) -> dict[str, Any]:
            schema = super().subclass_def(class_type, action)
            if "anyOf" in schema:
                schema["anyOf"] = [kind for kind in schema["anyOf"] if class_name(kind) not in BASES]
            return schema

        def typehint_schema(self, typehint: Any, action: Any) -> dict[str, Any]:
            return schema_of(typehint, lambda other: super(Schema, self).typehint_schema(other, action))

    return Schema().generate(parser) | {"title": "Recipe", "description": "Recipe of tvr-lightning"}


def class_name(node: dict[str, Any]) -> str | None:
    """Return the name of the class whose options a node contains, or None."""
    names: list[str] = node.get("properties", {}).get("class_path", {}).get("enum", [])
    return names[0] if names else None


def _file() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return cache / "tvr-lightning" / f"options-{hashlib.sha256(str(PACKAGE).encode()).hexdigest()[:16]}.json"


@lru_cache
def _sources() -> str:
    from importlib.metadata import version

    state = [(str(path), path.stat().st_mtime_ns) for path in sorted(PACKAGE.rglob("*.py"))]
    return hashlib.sha256(repr((state, version("lightning"), version("jsonargparse"))).encode()).hexdigest()


SOURCES = _sources()
"""State of the sources when they were imported, since a running process may outlive an update of the package."""
