"""Overlays for hardware set the machine and leave the training to the recipe."""

from pathlib import Path

import pytest

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.data.loader import TrainingSampler
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.errors import UserError

RECIPES = Path(__file__).parent.parent / "recipes"
HARDWARE = RECIPES / "hardware"
DEVICES = {
    "cpu": 1, "gpu1": 1, "ddp4": 4, "ddp8": 8, "gpu1-bf16": 1, "ddp4-bf16": 4, "ddp8-bf16": 8, "fsdp8-bf16": 8,
    "multinode": 16,
}  # fmt: skip
OF_THE_MACHINE = {"accelerator", "devices", "num_nodes", "strategy", "precision"}


def test_overlays_set_only_the_machine():
    found = {}
    for overlay in set(HARDWARE.glob("*.yaml")) - {HARDWARE / "compiled.yaml", HARDWARE / "tf32.yaml"}:
        recipe = read_recipe(overlay)
        assert set(recipe) == {"trainer", "data"}, overlay
        assert set(recipe["trainer"]) <= OF_THE_MACHINE, overlay
        assert set(recipe["data"]["init_args"]) == {"num_workers"}, overlay
        found[overlay.stem] = recipe["trainer"]["devices"] * recipe["trainer"].get("num_nodes", 1)
    assert found == DEVICES


def test_answering_refuses_ddp_that_expects_a_gradient_for_every_parameter():
    given = [str(RECIPES / name) for name in ("dpdv-vqa.yaml", "hardware/ddp8-bf16.yaml")]
    with pytest.raises(UserError, match=r"--trainer\.strategy=ddp_find_unused_parameters_true"):
        Recipe.parse(given, []).check_trainer()
    for more in ("trainer.strategy=ddp_find_unused_parameters_true", "trainer.strategy.find_unused_parameters=true"):
        Recipe.parse(given, [f"--{more}"]).check_trainer()


def test_overlays_compile_both_towers_and_shard_over_all_devices_into_one_file():
    config = Recipe.parse(["clip4clip", "hardware/fsdp8-bf16", "hardware/compiled"]).config
    assert config.model.init_args.encoder.init_args.compile_towers is True
    trainer, options = config.trainer, config.trainer.strategy.init_args
    assert trainer.strategy.class_path.endswith("ModelParallelStrategy")
    assert (options.data_parallel_size, options.tensor_parallel_size) == (trainer.devices, 1)
    assert options.save_distributed_checkpoint is False


def test_an_overlay_adds_tf32_to_other_callbacks():
    given = ["xpool", "hardware/gpu1", "hardware/tf32"]
    callbacks = Recipe.parse(given, ["--trainer.callbacks+=EMAWeightAveraging"]).config.trainer.callbacks
    assert [each.class_path.rpartition(".")[2] for each in callbacks] == ["TF32", "EMAWeightAveraging"]


def test_batches_of_the_recipes_divide_over_the_devices(tmp_path):
    for path in RECIPES.glob("*.yaml"):
        data = read_recipe(path).get("data") or {}
        TrainingSampler(10**6, data.get("init_args", {}).get("batch_size", 128), replicas=4)
    assert MSRVTT(root=str(tmp_path)).batch_size % 8 == 0
