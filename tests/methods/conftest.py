"""Synthetic data for the tests of methods, and methods built from recipes."""

import pytest
from methods.parts import RECIPES, run

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
def learned(built_once, fixture_root):
    """Options of `run` for four epochs on these videos that start from an encoder trained on them with mean pooling."""

    # Random embeddings have to be trained too, other than CLIP's.
    everything = '--model.init_args.tuning={"class_path": "FineTuning", "init_args": {"train": ["*"]}}'

    def fit(path):
        run("fit", ["clip4clip", "fixture"], fixture_root, path, everything, "--trainer.check_val_every_n_epoch=30")

    trained = built_once("learned", fit) / "clip4clip-msrvtt" / "version_0" / "checkpoints" / "last.ckpt"
    encoder = f"--model.init_args.encoder.init_args.trained_in={trained}"
    return (
        encoder,
        everything,
        "--trainer.max_epochs=4",
        "--trainer.check_val_every_n_epoch=4",
        "--model.init_args.evaluation.audit=0",
    )


@pytest.fixture(scope="session")
def recipe(tiny_root):
    """Build the method and the data of a recipe with overlays: names of recipes, or paths of other files."""

    def build(*names, options=(), root=tiny_root):
        paths = [name if not isinstance(name, str) else RECIPES / f"{name}.yaml" for name in (*names, "fixture")]
        return from_recipe(paths, [f"--data.init_args.root={root}", "--data.init_args.num_workers=0", *options])

    return build
