"""The ledger says what docstrings, recipes and measurements say, and refuses what it cannot place."""

import json
from pathlib import Path

import pytest

import tvr_lightning.methods
from tvr_lightning.reproduce.ledger import LedgerError, entries, ledger, read_deviations, recipe_values

ROOT = Path(__file__).parent.parent.parent
EFFECTS = ROOT / "benchmarks" / "results" / "mechanisms.json"
DOCSTRING = """A method.

Deviations:
- ties: paper silent; released counts one; twice
  over; here expected.
- noise: released draws it; here none.
"""


def effects(path: Path, topic: str, half_width: float | None = 1.5) -> Path:
    effect = {"method": "GAID", "topic": topic, "world": "a world", "name": "the released gate", "mean": -2.0,
              "half_width": half_width, "seeds": 5}  # fmt: skip
    path.write_text(json.dumps({"leaks": [], "deviations": [effect]}), encoding="utf-8")
    return path


def test_the_committed_ledger_is_what_docstrings_recipes_and_measurements_give():
    committed = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    assert ledger(ROOT / "recipes", EFFECTS) == committed, "write it anew: python -m tvr_lightning.reproduce.ledger"


def test_every_method_of_the_package_has_an_entry():
    assert set(entries()) == set(tvr_lightning.methods.__all__)


def test_parts_are_told_apart_across_lines_and_semicolons():
    ties, noise = read_deviations("method", DOCSTRING).deviations
    assert (ties.topic, ties.paper, ties.here) == ("ties", "silent", "expected")
    assert ties.released == "counts one; twice over"
    assert (noise.paper, noise.released, noise.here) == ("", "draws it", "none")


@pytest.mark.parametrize(
    "item", ["- ties: paper silent; released counts.", "- ties here expected.", "- ties: here one; paper two."]
)
def test_an_item_of_another_form_is_refused_by_name(item):
    with pytest.raises(LedgerError, match=r"methods/method\.py, deviation 'ties"):
        read_deviations("method", f"A method.\n\nDeviations:\n{item}\n")


def test_a_docstring_without_a_list_is_refused():
    with pytest.raises(LedgerError, match="no line 'Deviations:'"):
        read_deviations("method", "A method.\n")


def test_a_measured_effect_stands_beside_its_deviation(tmp_path):
    text = ledger(ROOT / "recipes", effects(tmp_path / "effects.json", "gate"))
    (row,) = [line for line in text.splitlines() if line.startswith("| gate |")]
    assert row.endswith("| the released gate: -2.0 [-3.5, -0.5], a world, 5 seeds |")


def test_a_measured_effect_of_no_deviation_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="records no deviation 'colour'"):
        ledger(ROOT / "recipes", effects(tmp_path / "effects.json", "colour"))


def test_the_leaking_protocols_are_named_with_their_recipes():
    text = ledger(ROOT / "recipes", EFFECTS)
    for name in ("gaid-as-released", "tmass-as-released"):
        assert f"recipes/variants/{name}.yaml" in text
        assert (ROOT / "recipes" / "variants" / f"{name}.yaml").is_file()


def test_values_that_quote_paper_and_code_come_from_the_recipes():
    values = {(recipe, setting) for recipe, setting, _ in recipe_values(ROOT / "recipes", "gaid")}
    assert ("gaid.yaml", "text: query") in values
    assert not any(setting.startswith("fusion") for _, setting in values)  # its comment quotes the paper alone
