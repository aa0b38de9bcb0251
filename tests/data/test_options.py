"""Options of the datasets: complete, typed, and set by the overlay of each dataset."""

import inspect
import json

import pytest

import tvr_lightning.data as datasets
from tvr_lightning.config.recipe import data_from_recipe
from tvr_lightning.config.recipe_files import RECIPES, read_recipe
from tvr_lightning.data import TextVideoDataModule

DATASETS = ["ActivityNet", "Charades", "DiDeMo", "VideoFolder", "LSMDC", "MSRVTT", "MSRVTTQA", "MSVD", "VATEX"]
OVERLAYS = sorted((RECIPES / "data").glob("*.yaml"))
# A change of class keeps arguments of the same name, so an overlay must set every argument that depends on the
# dataset, and none of those that depend on the method or on the machine.
OF_THE_DATASET = {"split", "frames", "words", "captions_per_epoch", "holdout", "max_train_videos"}


def arguments(kind: type) -> set[str]:
    """Arguments that a class declares itself."""
    parameters = inspect.signature(kind).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


SHARED = arguments(TextVideoDataModule)


@pytest.mark.parametrize("name", DATASETS)
def test_hyperparameters_are_complete_and_those_of_the_recipe(name):
    in_python = getattr(datasets, name)(seed=3, batch_size=7)
    options = {"class_path": name, "init_args": {"seed": 3, "batch_size": 7}}
    by_recipe = data_from_recipe([json.dumps({"data": options})])
    assert set(in_python.hparams) >= SHARED
    assert (in_python.hparams["seed"], in_python.batch_size) == (3, 7)
    assert all(isinstance(value, str | int | float | None) for value in in_python.hparams.values())
    assert dict(in_python.hparams) == {k: v for k, v in by_recipe.hparams.items() if not k.startswith("_")}


def test_questions_do_not_take_extra_captions():
    with pytest.raises(ValueError, match="Unset extra_captions"):
        datasets.MSRVTTQA(extra_captions="captions.parquet")


def test_overlays_set_the_options_of_their_dataset_only():
    names = []
    for overlay in OVERLAYS:
        recipe = read_recipe(overlay)
        assert set(recipe) == {"data"}
        settings = recipe["data"]["init_args"]
        names.append(recipe["data"]["class_path"])
        kind = getattr(datasets, names[-1])
        assert set(settings) == OF_THE_DATASET | (arguments(kind) - SHARED)
        assert kind(**settings).directory == overlay.stem
    assert sorted([*names, "MSRVTTQA"]) == sorted(DATASETS)
