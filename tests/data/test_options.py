"""An option of the data stands in one place, and every dataset has it: in Python, recipes, help and checkpoints."""

import re
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

import tvr_lightning.data as rooms
from tvr_lightning.cli import main
from tvr_lightning.config.recipe import data_from_recipe
from tvr_lightning.data import TextVideoDataModule

DATASETS = ["ActivityNet", "Charades", "DiDeMo", "VideoFolder", "LSMDC", "MSRVTT", "MSRVTTQA", "MSVD", "VATEX"]
SHARED = {
    "root", "split", "frames", "words", "image_size", "resize_mode", "interpolation",
    "batch_size", "eval_batch_size", "num_workers", "sampling",
    "train_sampling", "augmentation", "captions_per_epoch", "on_corrupt", "holdout", "max_train_videos", "seed",
    "features", "audio", "audio_alignment", "audio_seconds", "extra_captions",
}  # fmt: skip


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


def test_a_recipe_that_misspells_an_option_is_refused_by_name(tmp_path: Path, capsys):
    recipe = tmp_path / "data.yaml"
    recipe.write_text("data: {class_path: LSMDC, init_args: {bach_size: 8}}")
    with pytest.raises((SystemExit, ValueError)) as refused:
        data_from_recipe([recipe])
    assert "bach_size" in capsys.readouterr().err + str(refused.value)


def test_questions_refuse_the_captions_of_retrieval():
    with pytest.raises(ValueError, match="Unset extra_captions"):
        rooms.MSRVTTQA(extra_captions="captions.parquet")
