"""`make clean` removes the files of `make demo` and `make smoke`, and none of the user; `make heads` trains."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tvr_lightning.cli import main

ROOT = Path(__file__).parent.parent
MADE = ("build/demo", "build/smoke")


def make(*words: str, folder: Path = ROOT) -> str:
    options = {"cwd": folder, "env": {**os.environ, "MAKEFLAGS": ""}, "check": True}
    return subprocess.run(["make", *words], capture_output=True, text=True, **options).stdout


@pytest.mark.parametrize("given", [(), ("FIXTURE=videos", "RUNS=results", "DEMO_FOLDER=results")])
def test_clean_keeps_runs_videos_and_other_builds(given, tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    mine = [
        "runs/gare-msrvtt/version_0/checkpoints/last.ckpt", "fixture/msrvtt/videos/mine.mp4", "videos/mine.mp4",
        "results/table.md", "features/store.safetensors", "build/lib/module.py",
    ]  # fmt: skip
    for name in (*mine, *(f"{folder}/msrvtt/MSRVTT_data.json" for folder in MADE)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    make("clean", *given, folder=tmp_path)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"Makefile", *mine}


@pytest.mark.parametrize("target", ["demo", "smoke"])
def test_demo_and_smoke_write_only_to_folders_that_clean_removes(target):
    commands = make("--dry-run", target, "VENV=/nowhere").replace("\\\n", " ")
    options = r"(?:--root|--data\.init_args\.root|--results\.directory|--runs|--videos|--out)"
    places = re.findall(rf"{options} (?!\d)(\S+)", commands)
    assert len(places) >= 3
    assert {place for place in places if not place.startswith(f"build/{target}")} == set()


def commands_of(target: str, **variables: str) -> list[list[str]]:
    """The `tvr` commands of a target, whose loops a shell unrolls."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    printed = make("--silent", "--dry-run", "-o", "/nowhere/.complete", target, "VENV=/nowhere", *settings)
    called = printed.replace("/nowhere/bin/tvr ", "tvr ")
    script = f"tvr() {{ printf '%s\\0' \"$@\"; printf '\\n'; }}\n{called}"
    lines = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split("\0")[:-1] for line in lines]


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
