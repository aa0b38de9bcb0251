"""The command that a report gives for a run makes that run, and no other."""

import shlex
from pathlib import Path

import pytest
from run_cards import keys_of, make_card

from tvr_lightning.cli import main
from tvr_lightning.reproduce.report.sources import run_of_card
from tvr_lightning.reproduce.runs.plan import Setting, make_plan
from tvr_lightning.reproduce.tables import load_table

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize("share", ["nothing", "encoder"])
@pytest.mark.parametrize("short", [False, True])
def test_a_run_is_planned_again_by_its_command(tmp_path, capsys, share, short):
    overlay = tmp_path / "a short one.yaml"
    overlay.write_text("trainer: {max_epochs: 1}\n")
    setting = Setting(RECIPES, tmp_path / "fixture", 20, overlay if short else None, (0, 3), share)
    plan = make_plan([load_table("gare-1", RECIPES)], setting)
    (_, key) = keys_of(plan, "gare-1/gare")
    card = make_card(plan.runs[key], tmp_path / "cards", 1.0)
    for needed in plan.runs[key].needs.values():
        make_card(plan.runs[needed], tmp_path / "cards", 1.0)
    words = shlex.split(run_of_card(card, tmp_path / "cards").command)
    assert words[0] == "tvr"
    assert main([*words[1:], f"--out={tmp_path}", f"--recipes={RECIPES}", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "gare-1/gare" in said
    assert "nothing left to run" in said
