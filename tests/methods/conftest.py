"""Synthetic data for the tests of methods, and methods built from recipes."""

import pytest
from methods.parts import RECIPES

from tvr_lightning.config.recipe import from_recipe


@pytest.fixture(scope="session")
def tiny_root(synthetic):
    """A synthetic MSR-VTT: 16 videos to train on and 4 to test on."""
    return synthetic("msrvtt", 20)


@pytest.fixture(scope="session")
def fixture_root(synthetic):
    """A synthetic MSR-VTT that methods can learn."""
    return synthetic("msrvtt", 500)


@pytest.fixture(scope="session")
def recipe(tiny_root):
    """Build the method and the data of a recipe with overlays: names of recipes, or paths of other files."""

    def build(*names, options=(), root=tiny_root):
        paths = [name if not isinstance(name, str) else RECIPES / f"{name}.yaml" for name in (*names, "fixture")]
        return from_recipe(paths, [f"--data.init_args.root={root}", "--data.init_args.num_workers=0", *options])

    return build
