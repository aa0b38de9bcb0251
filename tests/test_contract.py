"""Every method of the package keeps what `tvr_lightning.testing` asks of any method; each is found by its recipe."""

from pathlib import Path

import forked
import pytest
import yaml

from tvr_lightning.testing import MethodTestSuite, method_recipes, small

RECIPES = method_recipes(Path(__file__).parent.parent / "recipes")
for title, recipe in RECIPES.items():
    name = f"Test{title.replace(' ', '')}"
    globals()[name] = type(name, (MethodTestSuite,), {"recipe": recipe, "together": tuple(RECIPES.values())})


def test_every_method_of_the_package_is_found_by_a_recipe():
    import tvr_lightning.methods

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


def test_slow_tests_stay_slow_in_other_projects(tmp_path):
    recipe = next(iter(RECIPES.values()))
    suite = f"class TestMine(MethodTestSuite):\n    recipe = Path({str(recipe)!r})\n"
    head = "from pathlib import Path\nfrom tvr_lightning.testing import MethodTestSuite\n"
    (tmp_path / "test_mine.py").write_text(head + suite)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "run.py").write_text("import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))")
    words = ["-q", "-p", "no:cacheprovider", f"-c{tmp_path / 'pytest.ini'}", "-k", "two_processes", str(tmp_path)]
    found = forked.tvr(words, tmp_path, program=tmp_path / "run.py")
    assert found.returncode == 0, found.stdout
    assert "2 skipped" in found.stdout
