"""The table of architectures in the guide lists every architecture of open_clip."""

import re
from pathlib import Path

import open_clip
import pytest
from open_clip.factory import _MODEL_CONFIG_PATHS

GUIDE = Path(__file__).parents[2] / "docs" / "encoders.md"


def test_the_table_lists_the_architectures_of_open_clip():
    version = re.search(r"open_clip (\S+) lists", GUIDE.read_text(encoding="utf-8"))[1]
    if version != open_clip.__version__:
        pytest.skip(f"the table is of open_clip {version}; update it with benchmarks/architectures.py")
    table = GUIDE.read_text(encoding="utf-8").partition("<!-- architectures")[2]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    rows = {line[0].strip("`"): line[1:] for line in cells if line[0].startswith("`")}
    assert all(re.match(r"(runs, equal|shapes)(; stand-in [a-z ]+)?$", row[-1]) for row in rows.values())
    assert set(rows) == {path.stem for path in Path(_MODEL_CONFIG_PATHS[0]).glob("*.json")}
