"""Backbone overlays name models of open_clip and have published options."""

import re
from pathlib import Path

import open_clip
import pytest

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import read_recipe

ROOT = Path(__file__).parent.parent
BACKBONES = sorted(
    path
    for path in (ROOT / "recipes" / "backbone").glob("*.yaml")
    if "architecture" in path.read_text(encoding="utf-8")
)


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
