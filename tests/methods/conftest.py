"""Synthetic datasets that the tests of methods read, and their recipes on them."""

import pytest
from methods.parts import RECIPES

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.synthetic import synthesize


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory):
    """A synthetic MSR-VTT and VATEX of a few videos."""
    root = tmp_path_factory.mktemp("tiny")
    for dataset, videos in (("msrvtt", 20), ("vatex", 8)):
        synthesize(dataset, root, videos, 0, workers=1, progress=False)
    return root


@pytest.fixture(scope="session")
def fixture_root(tmp_path_factory):
    """A synthetic MSR-VTT that methods can learn."""
    root = tmp_path_factory.mktemp("fixture")
    synthesize("msrvtt", root, 500, 0, workers=2, progress=False)
    return root


@pytest.fixture(scope="session")
def recipe(tiny_root):
    """Build the method and the data of a recipe with overlays; names are of recipes, paths of other files."""

    def build(*names, options=()):
        paths = [name if not isinstance(name, str) else RECIPES / f"{name}.yaml" for name in (*names, "fixture")]
        return from_recipe(paths, [f"--data.init_args.root={tiny_root}", "--data.init_args.num_workers=0", *options])

    return build
