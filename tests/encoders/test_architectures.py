"""The table of architectures in the guide names every one of open_clip's, and none that fails."""

import re
from pathlib import Path

import open_clip
import pytest
from open_clip.factory import _MODEL_CONFIG_PATHS

GUIDE = Path(__file__).parents[2] / "docs" / "encoders.md"


def rows() -> dict[str, list[str]]:
    """Cells of each architecture."""
    table = GUIDE.read_text(encoding="utf-8").partition("<!-- architectures")[2]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    return {line[0].strip("`"): line[1:] for line in cells if line[0].startswith("`")}


def test_the_table_is_of_this_open_clips_architectures():
    version = re.search(r"open_clip (\S+) lists", GUIDE.read_text(encoding="utf-8"))[1]
    if version != open_clip.__version__:
        pytest.skip(f"the table is of open_clip {version}; write it anew with benchmarks/architectures.py")
    assert all(re.match(r"(runs, equal|shapes)(; stand-in [a-z ]+)?$", cells[-1]) for cells in rows().values())
    assert set(rows()) == {path.stem for path in Path(_MODEL_CONFIG_PATHS[0]).glob("*.json")}
