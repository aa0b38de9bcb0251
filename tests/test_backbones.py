"""Backbone overlays name models of open_clip, and the Makefile tests and trains with them."""

import os
import re
import subprocess
from pathlib import Path

import open_clip
import pytest

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import read_recipe

ROOT = Path(__file__).parent.parent
BACKBONES = sorted(
    path
    for path in (ROOT / "recipes" / "backbone").glob("*.yaml")
    if "architecture" in path.read_text(encoding="utf-8")
)


def commands_of(target: str, **variables: str) -> list[list[str]]:
    """The `tvr` commands of a target of the Makefile, whose loops a shell unrolls."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    printed = subprocess.run(
        ["make", "--silent", "--dry-run", "-o", "/nowhere/.complete", target, "VENV=/nowhere", *settings],
        cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "MAKEFLAGS": ""},
    ).stdout.replace("/nowhere/bin/tvr ", "tvr ")  # fmt: skip
    script = f"tvr() {{ printf '%s\\0' \"$@\"; printf '\\n'; }}\n{printed}"
    lines = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split("\0")[:-1] for line in lines]


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


@pytest.mark.slow
def test_make_heads_trains_the_heads_of_all_papers_on_one_store(msrvtt, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = [f"--data.init_args.root={msrvtt}", "--data.init_args.num_workers=0", "--data.init_args.frames=4"]
    cpu = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]
    fit = [*small, *cpu, "--data.init_args.batch_size=4", "--trainer.limit_train_batches=1"]
    fit.append("--model.init_args.evaluation.audit=0")
    recipes = ["--config=recipes/clip4clip.yaml", "--config=recipes/fixture.yaml"]
    assert main(["fit", *recipes, *fit, f"--results.directory={tmp_path}"]) == 0
    (encoder,) = tmp_path.glob("clip4clip-msrvtt/version_0/checkpoints/last.ckpt")
    shared = f"--config recipes/fixture.yaml --model.init_args.encoder.init_args.trained_in={encoder}"
    extract, *fits = commands_of("heads", ON=shared, FEATURES=str(tmp_path / "features"), RUNS=str(tmp_path))
    assert main([*extract, *small]) == 0
    assert [Path(command[2]).stem for command in fits] == ["gare", "tcmgc", "ncl", "dpdv", "gaid"]
    for command in fits:
        assert main([*command, *fit, "--model.init_args.tuning=Frozen"]) == 0
    assert len(list(tmp_path.glob("heads/*/version_0/results.json"))) == 5
