"""Every recipe parses, describes itself, and builds its method on the fixture's tiny encoder."""

from pathlib import Path

import pytest
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningModule

from tvr_lightning.config.recipe import Recipe, with_defaults
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.errors import UserError
from tvr_lightning.testing import method_recipes

RECIPES = Path(__file__).parents[2] / "recipes"
DATASETS = [path.stem for path in (RECIPES / "data").glob("*.yaml")]


def stacks():
    """Methods with their datasets, variants, and backbones, and alone if no `MethodTestSuite` builds them."""
    contents = {path.stem: read_recipe(path) for path in sorted(RECIPES.glob("*.yaml"))}
    methods = {name for name, content in contents.items() if "class_path" in (content or {}).get("model", {})}
    suites = {path.stem for path in method_recipes(RECIPES).values()}
    assert {"clip4clip", "tcmgc"} <= suites < methods
    found = [[method] for method in sorted(methods - suites)]
    for path in sorted(RECIPES.glob("*-*.yaml")):
        method, _, dataset = path.stem.partition("-")
        if method in methods and dataset in DATASETS:
            found.append([method, f"data/{dataset}", path.stem])
    for path in sorted((RECIPES / "variants").glob("*.yaml")):
        method = path.stem.partition("-")[0]
        found.append([method if method in methods else "gare", f"variants/{path.stem}"])
    for path in sorted((RECIPES / "backbone").glob("*.yaml")):
        method = path.stem.partition("-")[0]
        if method in methods:
            found.append([method, f"backbone/{path.stem}"])
    return found


@pytest.mark.parametrize("stack", stacks(), ids="+".join)
def test_recipes_build_their_method_on_the_fixture(stack):
    recipe = Recipe.parse([*stack, "fixture"], ["--model.init_args.encoder.init_args.width=64"])
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningModule, "model")
    built = parser.instantiate(Namespace(model=recipe.config.model)).model
    assert isinstance(built, LightningModule)
    assert built.encoder.dimension == 64


def test_the_options_that_an_overlay_drops_with_a_class_are_listed():
    recipe = Recipe.parse(["ucofia", "fixture", "tuning/lora", "tuning/adapter"])
    dropped = [name.removeprefix("model.init_args.").replace(".init_args", "") for name in recipe.dropped]
    encoder = ["encoder.architecture", "encoder.patch_shift", "encoder.weights"]
    assert dropped == [*encoder, "tuning.alpha", "tuning.rank", "tuning.targets", "tuning.train"]
    assert Recipe.parse(["ucofia"]).dropped == []


def test_an_option_that_the_data_would_replace_is_refused():
    with pytest.raises(UserError, match=r"words is 9, but it follows data\.init_args\.words, which is 32"):
        Recipe.parse(["tcmgc"], ["--model.init_args.words=9"])
    same = Recipe.parse(["tcmgc"], ["--model.init_args.words=9", "--data.init_args.words=9"])
    assert same.config.model.init_args.words == 9


@pytest.mark.parametrize(
    ("overlays", "batch"),
    [
        ([], 300),
        (["backbone/xclip-vit-b-16"], 80),
        (["data/didemo", "xclip-didemo"], 64),
        (["data/didemo", "xclip-didemo", "backbone/xclip-didemo-vit-b-16"], 16),
        (["data/activitynet", "xclip-activitynet"], 112),
    ],
)
def test_xclip_trains_with_the_batches_of_its_released_scripts(overlays, batch):
    assert Recipe.parse(["xclip", *overlays]).config.data.init_args.batch_size == batch


@pytest.mark.parametrize("tuning", sorted(path.stem for path in (RECIPES / "tuning").glob("*.yaml")))
def test_the_fixture_keeps_the_tuning_of_an_earlier_recipe(tuning):
    alone, on_fixture = (Recipe.parse(["tcmgc", f"tuning/{tuning}", *more]) for more in ([], ["fixture"]))
    assert on_fixture.config.model.init_args.tuning == alone.config.model.init_args.tuning
    assert on_fixture.replaced == []


def test_a_class_of_an_overlay_that_a_later_recipe_replaces_is_reported_with_both_files(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("data: MSVD\nmodel: {init_args: {tuning: Frozen, evaluation: {normalization: null}}}\n")
    stack = ["data/didemo", "tcmgc", "backbone/siglip2-b-16", "variants/two-stage", "tuning/lora", "fixture", own]
    recipe = Recipe.parse(stack, ["--model.init_args.tuning.class_path=Adapter"])
    assert sorted(recipe.replaced) == [
        f"--config {own} replaces data of --config data/didemo with MSVD",
        f"--config {own} replaces model.init_args.evaluation.normalization of --config variants/two-stage with null",
        "--config fixture replaces model.init_args.encoder of --config backbone/siglip2-b-16 with TinyClipEncoder",
    ]
    assert Recipe.parse(["tcmgc", "data/didemo", "tcmgc-didemo", "variants/tcmgc-paper", "fixture"]).replaced == []


def test_an_older_recipe_gets_the_defaults_of_missing_options_without_importing_its_classes():
    now = Recipe.parse(["tcmgc"], ["--trainer.max_epochs=3"]).plain()
    older = Recipe.parse(["tcmgc"]).plain()
    del older["trainer"]["max_epochs"], older["data"]["init_args"]["seed"]
    older["model"]["init_args"]["tuning"] = {"class_path": "strangers.Tuning"}
    found = with_defaults(older, now)
    assert (found["trainer"]["max_epochs"], found["data"]["init_args"]["seed"]) == (None, 0)
    assert found["model"]["init_args"]["tuning"]["class_path"] == "strangers.Tuning"
