"""Backbones by overlay: they name what open_clip has; zero-shot, and the papers' heads on one store, by make."""

import json
import os
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import open_clip
import pytest
import yaml

from tvr_lightning.cli import main

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
BACKBONES = sorted(
    path for path in (RECIPES / "backbone").glob("*.yaml") if "architecture" in path.read_text(encoding="utf-8")
)
FIXTURE = ("--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1")


def made(target: str, **variables: str) -> list[list[str]]:
    """The `tvr` commands of a target of the Makefile, with shell loops unrolled by the shell itself."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    said = subprocess.run(
        ["make", "--silent", "--dry-run", "-o", "/nowhere/.complete", target, "VENV=/nowhere", *settings],
        cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "MAKEFLAGS": ""},
    ).stdout  # fmt: skip
    shown = said.replace("/nowhere/bin/tvr ", "tvr ")
    script = f"tvr() {{ printf '%s\\0' \"$@\"; printf '\\n'; }}\n{shown}"
    lines = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split("\0")[:-1] for line in lines]


@pytest.mark.parametrize("path", BACKBONES, ids=lambda path: path.stem)
def test_a_backbone_names_an_architecture_its_tag_and_its_frames(path):
    options = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["init_args"]["encoder"]["init_args"]
    assert set(options) == {"architecture", "weights"}
    assert options["weights"] in open_clip.list_pretrained_tags_by_model(options["architecture"])
    size = open_clip.get_model_config(options["architecture"])["vision_cfg"]["image_size"]
    said = re.search(r"frames of (\d+) x (\d+) pixels", path.read_text(encoding="utf-8"))
    assert said is None or {int(side) for side in said.groups()} == {size}


def test_zero_shot_needs_no_training(msrvtt, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (command,) = made("zero-shot", ON="--config recipes/fixture.yaml", RUNS=str(tmp_path))
    assert command[0] == "test"
    assert main([*command, f"--data.init_args.root={msrvtt}", "--data.init_args.num_workers=0", *FIXTURE]) == 0
    (found,) = tmp_path.glob("zero-shot/*/version_0/results.json")
    results = json.loads(found.read_text(encoding="utf-8"))
    assert results["checkpoint"] is None
    assert not list(found.parent.glob("checkpoints/*.ckpt"))
    assert "no checkpoint was given" in capsys.readouterr().out


def test_the_heads_of_all_papers_train_on_one_store(msrvtt, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = [f"--data.init_args.root={msrvtt}", "--data.init_args.num_workers=0", "--data.init_args.frames=4"]
    fit = [*small, "--data.init_args.batch_size=4", *FIXTURE]
    recipes = ["--config=recipes/clip4clip.yaml", "--config=recipes/fixture.yaml"]
    assert main(["fit", *recipes, *fit, f"--results.directory={tmp_path}"]) == 0
    (encoder,) = tmp_path.glob("clip4clip-msrvtt/version_0/checkpoints/last.ckpt")
    shared = f"--config recipes/fixture.yaml --model.init_args.encoder.init_args.trained_in={encoder}"
    store = str(tmp_path / "features")
    extract, *fits = made("heads", ON=shared, FEATURES=store, RUNS=str(tmp_path))
    assert main([*extract, *small]) == 0
    assert [Path(command[2]).stem for command in fits] == ["gare", "tcmgc", "ncl", "dpdv", "gaid"]
    for command in fits:
        assert main([*command, *fit, "--model.init_args.tuning=Frozen"]) == 0
    assert len(list(tmp_path.glob("heads/*/version_0/results.json"))) == 5


def test_patches_and_sound_are_stored_for_those_that_need_them():
    what = [made("heads", HEADS=heads)[0] for heads in ("gare ncl", "gare dpdv", "gaid")]
    parts = [[part for option, part in pairwise(command) if option == "--parts"] for command in what]
    assert parts == [["text", "frames"], ["text", "frames", "patches"], ["text", "frames", "audio"]]
    assert [Path(command[2]).stem for command in what] == ["clip4clip", "clip4clip", "gaid"]
    assert shlex.join(what[0]).count("recipes/backbone/pe-core-b.yaml") == 1
