"""Every method of the package keeps what `tvr_lightning.testing` asks of any method; each is found by its recipe."""

from pathlib import Path

from tvr_lightning.testing import MethodTestSuite, method_recipes

RECIPES = method_recipes(Path(__file__).parent.parent / "recipes")
for title, recipe in RECIPES.items():
    name = f"Test{title.replace(' ', '')}"
    globals()[name] = type(name, (MethodTestSuite,), {"recipe": recipe, "together": tuple(RECIPES.values())})


def test_every_method_of_the_package_is_found_by_a_recipe():
    import tvr_lightning.methods

    found = {word for title in RECIPES for word in title.split(" on ")}
    missing = set(tvr_lightning.methods.__all__) - {"VideoQuestionAnswering"} - found
    assert not missing, f"no recipe builds {', '.join(sorted(missing))}: write recipes/<method>.yaml"
