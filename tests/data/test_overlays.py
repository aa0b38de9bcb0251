import inspect
from pathlib import Path

import pytest
import yaml

import tvr_lightning.data as rooms
from tvr_lightning.data import TextVideoDataModule

OVERLAYS = sorted((Path(__file__).parents[2] / "recipes" / "data").glob("*.yaml"))
DATASETS = [
    rooms.ActivityNet, rooms.Charades, rooms.DiDeMo, rooms.VideoFolder, rooms.LSMDC, rooms.MSRVTT, rooms.MSVD,
    rooms.VATEX,
]  # fmt: skip

# Every argument that datasets share belongs to the dataset, to the method or to the machine. A change of class keeps
# arguments of the same name, so an overlay must set all of the first kind, and none of the others.
OF_THE_DATASET = {"split", "frames", "words", "captions_per_epoch", "holdout", "max_train_videos"}
OF_THE_METHOD = {
    "sampling", "train_sampling", "augmentation", "image_size", "resize_mode", "interpolation", "antialias",
    "batch_size", "drop_last", "reshuffle", "seed", "features", "audio", "audio_alignment", "audio_seconds",
    "extra_captions",
}  # fmt: skip
OF_THE_MACHINE = {"root", "num_workers", "eval_batch_size", "on_corrupt", "pixels"}


def arguments(kind: type) -> dict[str, inspect.Parameter]:
    """Arguments that a class names itself."""
    parameters = inspect.signature(kind).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def test_every_shared_argument_belongs_somewhere():
    assert set(arguments(TextVideoDataModule)) == OF_THE_DATASET | OF_THE_METHOD | OF_THE_MACHINE


@pytest.mark.parametrize("kind", DATASETS)
def test_a_dataset_names_no_option_again_but_those_whose_default_is_its_own(kind):
    own = set(arguments(kind)) & set(arguments(TextVideoDataModule))
    assert own in ({"split"}, {"split", "frames", "words"})


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_sets_what_belongs_to_the_dataset_and_nothing_else(overlay):
    recipe = yaml.safe_load(overlay.read_text())
    assert set(recipe) == {"data"}
    kind = getattr(rooms, recipe["data"]["class_path"])
    settings = recipe["data"]["init_args"]
    own = set(arguments(kind)) - set(arguments(TextVideoDataModule))
    assert set(settings) == OF_THE_DATASET | own
    data = kind(**settings)
    assert data.directory == overlay.stem


def test_every_dataset_has_its_overlay():
    assert {path.stem for path in OVERLAYS} == {kind.directory for kind in DATASETS}
