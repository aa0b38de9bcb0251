"""Every recipe parses, describes itself, and builds its method on the fixture's tiny encoder.

Overlays of backbones name existing models, and those for hardware leave the training to the recipe.
"""

import re

import open_clip
import pytest
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningModule

from tvr_lightning.config.recipe import Recipe, with_defaults
from tvr_lightning.config.recipe_files import RECIPES, read_recipe
from tvr_lightning.data.loader import TrainingSampler
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.errors import UserError
from tvr_lightning.testing import method_recipes

DATASETS = [path.stem for path in (RECIPES / "data").glob("*.yaml")]
BACKBONES = [
    path for path in sorted((RECIPES / "backbone").glob("*.yaml")) if "architecture" in path.read_text(encoding="utf-8")
]
DEVICES = {
    "cpu": 1, "gpu1": 1, "ddp4": 4, "ddp8": 8, "gpu1-bf16": 1, "ddp4-bf16": 4, "ddp8-bf16": 8, "fsdp8-bf16": 8,
    "multinode": 16,
}  # fmt: skip


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


@pytest.mark.parametrize("path", BACKBONES, ids=lambda path: path.stem)
def test_a_backbone_names_a_model_of_open_clip_and_its_image_size(path):
    options = read_recipe(path)["model"]["init_args"]["encoder"]["init_args"]
    assert set(options) == {"architecture", "weights"}
    assert options["weights"] in open_clip.list_pretrained_tags_by_model(options["architecture"])
    size = open_clip.get_model_config(options["architecture"])["vision_cfg"]["image_size"]
    comment = re.search(r"frames of (\d+) x (\d+) pixels", path.read_text(encoding="utf-8"))
    assert comment is None or {int(side) for side in comment.groups()} == {size}


@pytest.mark.parametrize(
    ("recipes", "weights", "words"),
    [
        ([], "2B", "contains the following visual content."), (["qwen3-vl-embedding-8b"], "8B", "visual content."),
        (["qwen3-vl-embedding-didemo"], "2B", "includes the following described scenes."),
        (["qwen3-vl-embedding-msvd"], "2B", "corresponds to the given summary."),
        (["qwen3-vl-embedding-vatex"], "2B", "fits the description provided."),
    ],
)  # fmt: skip
def test_datasets_have_the_published_instructions_sizes_and_times(recipes, weights, words):
    dataset = [f"data/{name}" for recipe in recipes if (name := recipe.rpartition("-")[2]) != "8b"]
    backbones = [f"backbone/{name}" for name in ("qwen3-vl-embedding-2b", *recipes)]
    config = Recipe.parse(["zero-shot", *dataset, *backbones]).config
    encoder, data = config.model.init_args.encoder.init_args, config.data.init_args
    assert encoder.weights == f"Qwen/Qwen3-VL-Embedding-{weights}"
    assert encoder.query_instruction.endswith(words)
    assert (encoder.video_options.resize, encoder.video_options.timestamps) == ("published", "list")
    assert (data.frames, data.sampling) == (64, "uniform-floor")


def test_hardware_overlays_set_only_the_machine():
    found, hardware = {}, RECIPES / "hardware"
    for overlay in set(hardware.glob("*.yaml")) - {hardware / "compiled.yaml", hardware / "tf32.yaml"}:
        recipe = read_recipe(overlay)
        assert set(recipe) == {"trainer", "data"}, overlay
        assert set(recipe["trainer"]) <= {"accelerator", "devices", "num_nodes", "strategy", "precision"}, overlay
        assert set(recipe["data"]["init_args"]) == {"num_workers"}, overlay
        found[overlay.stem] = recipe["trainer"]["devices"] * recipe["trainer"].get("num_nodes", 1)
    assert found == DEVICES


def test_answering_refuses_ddp_that_expects_a_gradient_for_every_parameter():
    given = [str(RECIPES / name) for name in ("dpdv-vqa.yaml", "hardware/ddp8-bf16.yaml")]
    with pytest.raises(UserError, match=r"--trainer\.strategy=ddp_find_unused_parameters_true"):
        Recipe.parse(given, []).check_trainer()
    for more in ("trainer.strategy=ddp_find_unused_parameters_true", "trainer.strategy.find_unused_parameters=true"):
        Recipe.parse(given, [f"--{more}"]).check_trainer()


def test_hardware_overlays_compile_both_towers_and_shard_over_all_devices_into_one_file():
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
