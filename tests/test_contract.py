"""Every method of the package passes `tvr_lightning.testing`; each is found by its recipe."""

from pathlib import Path

import pytest
import yaml

import tvr_lightning.methods
from tvr_lightning.testing import MethodTestSuite, method_recipes, small

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = {**method_recipes(FOLDER), "TempMe on CLIP4Clip": FOLDER / "tempme.yaml"}
for title, recipe in RECIPES.items():
    name = f"Test{title.replace(' ', '')}"
    globals()[name] = type(name, (MethodTestSuite,), {"recipe": recipe, "together": tuple(RECIPES.values())})


def test_every_method_of_the_package_has_a_recipe():
    found = {word for title in RECIPES for word in title.split(" on ")}
    missing = set(tvr_lightning.methods.__all__) - {"VideoQuestionAnswering"} - found
    assert not missing, f"no recipe builds {', '.join(sorted(missing))}: write recipes/<method>.yaml"


def test_the_suite_builds_the_encoder_and_the_tuning_of_the_recipe(tmp_path):
    content = yaml.safe_load((Path(__file__).parent / "examples" / "color_grid_encoder.yaml").read_text())
    content["model"]["init_args"]["tuning"] = {"class_path": "FineTuning", "init_args": {"train": ["*bias"]}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(content))
    suite = type("Suite", (MethodTestSuite,), {"recipe": recipe})()
    method = small(recipe)[0]
    assert type(method.encoder).__name__ == "ColorGridEncoder"
    assert method.tuning.train == ("*bias",)
    suite.test_no_part_of_its_recipe_is_left_out(method)
    for option in ("tuning=null", "encoder.init_args.cell=4"):
        changed = small(recipe, f"--model.init_args.{option}")[0]
        with pytest.raises(AssertionError, match=f"without these options of its recipe: model.{option.split('=')[0]}"):
            suite.test_no_part_of_its_recipe_is_left_out(changed)


def test_slow_tests_stay_slow_in_other_projects(tmp_path, capsys):
    suite = f"class TestMine(MethodTestSuite):\n    recipe = Path({str(RECIPES['XPool'])!r})\n"
    head = "from pathlib import Path\nfrom tvr_lightning.testing import MethodTestSuite\n"
    (tmp_path / "test_mine.py").write_text(head + suite)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    options = ["-q", "-p", "no:cacheprovider", f"-c{tmp_path / 'pytest.ini'}", "-k", "two_processes"]
    assert pytest.main([*options, str(tmp_path)]) == 0
    assert "2 skipped" in capsys.readouterr().out
