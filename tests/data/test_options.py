"""An option of the data stands in one place, and every dataset has it: in Python, recipes, help and checkpoints."""

import inspect
import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

import tvr_lightning.data as rooms
from tvr_lightning.cli import main
from tvr_lightning.data import TextVideoDataModule

DATASETS = ["ActivityNet", "Charades", "DiDeMo", "VideoFolder", "LSMDC", "MSRVTT", "MSRVTTQA", "MSVD", "VATEX"]
OVERLAYS = sorted((Path(__file__).parents[2] / "recipes" / "data").glob("*.yaml"))
# Every argument that datasets share belongs to the dataset, to the method or to the machine. A change of class keeps
# arguments of the same name, so an overlay must set all of the first kind, and none of the others.
OF_THE_DATASET = {"split", "frames", "words", "captions_per_epoch", "holdout", "max_train_videos"}
OF_THE_METHOD = {
    "sampling", "train_sampling", "augmentation", "image_size", "resize_mode", "interpolation", "antialias",
    "batch_size", "drop_last", "reshuffle", "seed", "features", "audio", "audio_alignment", "audio_seconds",
    "extra_captions",
}  # fmt: skip
OF_THE_MACHINE = {"root", "num_workers", "eval_batch_size", "on_corrupt", "pixels"}
SHARED = OF_THE_DATASET | OF_THE_METHOD | OF_THE_MACHINE


def parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(TextVideoDataModule, "data")
    return parser


@pytest.mark.parametrize("name", DATASETS)
def test_hyperparameters_are_complete_and_plain_however_a_dataset_is_built(name):
    in_python = getattr(rooms, name)(seed=3, batch_size=7)
    config = parser().parse_object({"data": {"class_path": name, "init_args": {"seed": 3, "batch_size": 7}}})
    by_recipe = parser().instantiate(config).data
    for data in (in_python, by_recipe):
        assert set(data.hparams) >= SHARED
        assert (data.seed, data.batch_size) == (3, 7)
        assert (data.hparams["seed"], data.hparams["batch_size"]) == (3, 7)
        assert all(isinstance(value, str | int | float | None) for value in data.hparams.values())
    assert dict(in_python.hparams) == {k: v for k, v in by_recipe.hparams.items() if not k.startswith("_")}


@pytest.mark.parametrize("name", DATASETS)
def test_types_are_checked_and_unknown_names_refused(name):
    for options, found in (
        ({"batch_size": "many"}, "batch_size"),
        ({"bach_size": 8}, "bach_size"),
        ({"audio": "x"}, "audio"),
    ):
        with pytest.raises(Exception, match=found):
            parser().parse_object({"data": {"class_path": name, "init_args": options}})
    with pytest.raises(TypeError, match="bach_size"):
        getattr(rooms, name)(bach_size=8)
    if name == "MSRVTTQA":
        with pytest.raises(ValueError, match="Unset extra_captions"):
            rooms.MSRVTTQA(extra_captions="captions.parquet")


def test_help_shows_every_option_with_its_sentence_and_default(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--data.help=DiDeMo"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in SHARED:
        described = re.search(rf"--data\.(init_args\.)?{name} \S+ (\S.*?)\((required, )?type: ", shown)
        assert described, name
        assert len(described[2]) > 15, described[0]
    assert re.search(r"--data\.(init_args\.)?frames FRAMES number of frames F per clip.*?default: 64\)", shown)


def arguments(kind: type) -> set[str]:
    """Arguments that a class names itself."""
    parameters = inspect.signature(kind).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def test_a_dataset_names_no_option_again_but_those_whose_default_is_its_own():
    assert arguments(TextVideoDataModule) == SHARED
    for name in DATASETS:
        assert arguments(getattr(rooms, name)) & SHARED in ({"split"}, {"split", "frames", "words"})


def test_every_dataset_has_an_overlay_that_sets_what_belongs_to_it_and_nothing_else():
    kinds = []
    for overlay in OVERLAYS:
        recipe = yaml.safe_load(overlay.read_text())
        assert set(recipe) == {"data"}
        settings = recipe["data"]["init_args"]
        kinds.append(recipe["data"]["class_path"])
        kind = getattr(rooms, kinds[-1])
        assert set(settings) == OF_THE_DATASET | (arguments(kind) - SHARED)
        assert kind(**settings).directory == overlay.stem
    assert sorted([*kinds, "MSRVTTQA"]) == sorted(DATASETS)
