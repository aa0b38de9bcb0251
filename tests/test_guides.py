"""The guides' code is the examples that the suite runs, and what the guides name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"<!-- file: (?P<path>\S+) -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)
LINK = re.compile(r"`((?:tvr_lightning|recipes|tests|docs|benchmarks)/[\w./-]+\.(?:py|yaml|md|safetensors))`")
SHOWN = {
    "adding-a-method.md": ("dual_softmax_loss", "query_scoring"),
    "adding-a-dataset.md": ("folder",),
    "adding-an-encoder.md": ("colour_grid_encoder",),
}


@pytest.mark.parametrize("guide", SHOWN)
def test_a_guide_shows_its_example_as_it_is(guide):
    text = (ROOT / "docs" / guide).read_text(encoding="utf-8")
    shown = {match["path"]: match["text"] for match in BLOCK.finditer(text)}
    expected = {file for name in SHOWN[guide] for file in (f"{name}.py", f"{name}.yaml", f"test_{name}.py")}
    assert {Path(path).name for path in shown} == expected
    for path, block in shown.items():
        assert block == (ROOT / path).read_text(encoding="utf-8"), f"docs/{guide} shows another {path}"


PAGES = ["README.md", "CHANGELOG.md", *(f"docs/{guide}" for guide in SHOWN)]
FURTHER = [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in SHOWN]


def absent_from(page):
    named = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    return named, [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page):
    named, absent = absent_from(page)
    assert named
    assert absent == []


def test_the_files_that_the_other_pages_name_exist():
    found = [absent_from(page) for page in FURTHER]
    assert sum(len(named) for named, _ in found) > len(FURTHER)
    assert [absent for _, absent in found if absent] == []
