"""`make clean` removes the files of `make demo` and `make smoke`, and none of the user."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

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
