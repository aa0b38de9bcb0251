"""The page of equations names their lines, and is that of the code as it is."""

from pathlib import Path

import pytest

from tvr_lightning.reproduce.equations import METHODS, page, places

ROOT = Path(__file__).parent.parent.parent
PAPERS = [path.parent.name for path in sorted(METHODS.glob("*/model.py"))]


def test_the_committed_page_is_that_of_the_code():
    committed = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    assert page() == committed, "write it anew: python -m tvr_lightning.reproduce.equations"


@pytest.mark.parametrize("paper", PAPERS)
def test_every_place_names_its_equation(paper):
    found = places(METHODS / paper)
    assert found
    for place in found:
        line = (METHODS / place.file).read_text(encoding="utf-8").splitlines()[place.line - 1]
        assert "Eq" in line, place


def test_ranges_and_appendices_are_told_apart(tmp_path):
    paper = tmp_path / "paper"
    paper.mkdir()
    source = '''"""Eq. 99 is told, not computed."""


def loss(x):
    """Return it (Eqs. 2-4, 7; Eqs. C.1 and 9)."""
    return x  # Eqs. 11 to 12
'''
    (paper / "model.py").write_text(source, encoding="utf-8")
    found = {place.number: (place.within, place.line) for place in places(paper)}
    assert list(found) == ["2", "3", "4", "7", "9", "11", "12", "C.1"]
    assert found["3"] == ("loss", 5)
    assert found["12"] == ("loss", 6)
