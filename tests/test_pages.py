"""docs/deviations.md and docs/equations.md match the code."""

import json
from pathlib import Path

import pages
import pytest

import tvr_lightning.methods

ROOT = Path(__file__).parent.parent
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "mechanisms.json").read_text(encoding="utf-8"))
PAPERS = [path.parent for path in sorted(pages.METHODS.glob("*/model.py"))]


def test_the_committed_pages_match_the_code():
    for name, text in (("deviations", pages.deviations_page(MEASURED)), ("equations", pages.equations_page())):
        assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == text, "run python docs/pages.py"
    assert set(pages.method_files()) == {*tvr_lightning.methods.__all__, "TempMe"}


@pytest.mark.parametrize(
    ("docstring", "message"),
    [
        ("\n\nDeviations:\n- ties: paper silent; released counts.\n", "deviation 'ties"),
        ("\n\nDeviations:\n- ties here expected.\n", "deviation 'ties"),
        ("\n\nDeviations:\n- ties: here one; paper two.\n", "deviation 'ties"),
        ("\n", "no line 'Deviations:'"),
    ],
)
def test_a_malformed_list_of_deviations_is_refused(docstring, message):
    with pytest.raises(ValueError, match=message):
        pages.deviations(f"A method.{docstring}")


@pytest.mark.parametrize("name", ["dual_softmax_loss", "query_scoring"])
def test_the_examples_of_the_guide_list_their_deviations(name):
    assert pages.deviations(pages.docstring(ROOT / "tests" / "examples" / f"{name}.py"))


def test_a_measured_effect_is_shown_with_its_deviation():
    effect = {"method": "GAID", "topic": "gate", "setting": "a setting", "name": "the released gate", "mean": -2.0,
              "half_width": 1.5, "seeds": 5}  # fmt: skip
    page = pages.deviations_page({"leaks": [], "deviations": [effect]})
    (row,) = [line for line in page.splitlines() if line.startswith("| gate |")]
    assert row.endswith("| the released gate: -2.0 [-3.5, -0.5], a setting, 5 seeds |")
    with pytest.raises(ValueError, match="lists no deviation 'color'"):
        pages.deviations_page({"leaks": [], "deviations": [effect | {"topic": "color"}]})


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_link_points_to_a_line_that_names_its_equation(paper):
    found = list(pages.equations(paper))
    assert found
    for _, link in found:
        file, line = link.partition("(../")[2].rstrip(")").split("#L")
        assert "Eq" in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1], link
