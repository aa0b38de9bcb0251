"""Hardware overlays: which machine, never which training."""

from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import ModelParallelStrategy

from tvr_lightning.config.recipe import Recipe, from_recipe
from tvr_lightning.data.loader import TrainingSampler
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.errors import UserError
from tvr_lightning.testing.small import synthetic_data

RECIPES = Path(__file__).parent.parent / "recipes"
COMPILED = RECIPES / "hardware" / "compiled.yaml"
OVERLAYS = sorted(set((RECIPES / "hardware").glob("*.yaml")) - {COMPILED})
DEVICES = {
    "cpu": 1, "gpu1": 1, "ddp4": 4, "ddp8": 8, "gpu1-bf16": 1, "ddp4-bf16": 4, "ddp8-bf16": 8, "fsdp8-bf16": 8,
    "multinode": 16,
}  # fmt: skip
OF_THE_MACHINE = {"accelerator", "devices", "num_nodes", "strategy", "precision"}


def test_overlays_set_the_machine_and_leave_batch_and_schedule_to_the_recipe():
    found = {}
    for overlay in OVERLAYS:
        recipe = yaml.safe_load(overlay.read_text())
        trainer = recipe["trainer"]
        assert set(recipe) == {"trainer", "data"}, overlay
        assert set(trainer) <= OF_THE_MACHINE, overlay
        assert set(recipe["data"]["init_args"]) == {"num_workers"}, overlay
        found[overlay.stem] = trainer["devices"] * trainer.get("num_nodes", 1)
    assert found == DEVICES


def test_answering_refuses_ddp_that_expects_a_gradient_for_every_parameter():
    given = [str(RECIPES / name) for name in ("dpdv-vqa.yaml", "hardware/ddp8-bf16.yaml")]
    with pytest.raises(UserError, match=r"--trainer\.strategy=ddp_find_unused_parameters_true"):
        Recipe.parse(given, []).check_trainer()
    for more in ("trainer.strategy=ddp_find_unused_parameters_true", "trainer.strategy.find_unused_parameters=true"):
        Recipe.parse(given, [f"--{more}"]).check_trainer()


@pytest.mark.filterwarnings("ignore")  # what torch's own compiler deprecates
def test_encoders_are_compiled_on_top_of_any_machine_and_method():
    root = f"--data.init_args.root={synthetic_data()}"
    for recipe in ("clip4clip", "gaid"):
        options = [root, "--data.init_args.audio=none"] if recipe == "clip4clip" else [root]
        method, _ = from_recipe([recipe, "hardware/cpu", "fixture", COMPILED], options)
        blocks = [*method.encoder.clip.visual.transformer.resblocks, *method.encoder.clip.transformer.resblocks]
        assert all(block._compiled_call_impl is not None for block in blocks)


def test_the_sharded_overlay_builds_fsdp2_over_all_devices_with_checkpoints_in_one_file():
    config = yaml.safe_load((RECIPES / "hardware" / "fsdp8-bf16.yaml").read_text())["trainer"]
    parser = ArgumentParser()
    parser.add_subclass_arguments(ModelParallelStrategy, "strategy")
    strategy = parser.instantiate(parser.parse_object({"strategy": config["strategy"]})).strategy
    assert strategy._data_parallel_size == config["devices"]
    assert strategy._tensor_parallel_size == 1
    assert strategy._save_distributed_checkpoint is False


def test_batches_of_the_recipes_divide_over_the_devices(tmp_path):
    for path in RECIPES.glob("*.yaml"):
        data = yaml.safe_load(path.read_text()).get("data") or {}
        TrainingSampler(10**6, data.get("init_args", {}).get("batch_size", 128), replicas=4)
    assert MSRVTT(root=str(tmp_path)).batch_size % 8 == 0
    with pytest.raises(UserError, match="nearest valid sizes: 296 or 304"):
        TrainingSampler(1000, 300, replicas=8)
