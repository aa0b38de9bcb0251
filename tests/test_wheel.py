"""The wheel, installed outside the checkout, contains the recipes, tables, and search page that a user needs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import small_run

ROOT = Path(__file__).parent.parent
CHECKPOINT = "runs/clip4clip-msrvtt/version_0/checkpoints/last.ckpt"
CLIP = "fixture/msrvtt/videos/video0.mp4"
COMMANDS = [
    ["data", "synth", "msrvtt", "--videos", "12", "--num_workers", "1"],
    ["fit", *small_run(Path("fixture"), Path("runs"))],
    ["index", CLIP, "--out", "index", "--ckpt_path", CHECKPOINT],
    ["search", "a red star", "--index", "index"],
    ["reproduce", "gare-1", "--only", "gare", "--dry_run"],
]
# One process, since each would load torch.
PROGRAM = """
import json, sys
from pathlib import Path
import tvr_lightning
from tvr_lightning.cli import main

print(tvr_lightning.__file__)
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""


@pytest.mark.slow
def test_the_wheel_contains_every_recipe_and_runs_outside_a_checkout(tmp_path):
    source, site, home = tmp_path / "source", tmp_path / "site", tmp_path / "home"

    def run(*command):
        environment = {name: value for name, value in os.environ.items() if name not in ("TVR_DATA", "PYTHONPATH")}
        environment |= {"PYTHONPATH": str(site), "XDG_STATE_HOME": str(home / "state")}
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    home.mkdir()
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("tvr_lightning", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    shutil.rmtree(source)

    recipes = site / "tvr_lightning" / "recipes"
    found, expected = ({path.relative_to(f) for path in f.rglob("*.yaml")} for f in (recipes, ROOT / "recipes"))
    assert found == expected

    printed = run(sys.executable, "-c", PROGRAM, json.dumps(COMMANDS))
    assert Path(printed.splitlines()[0]).is_relative_to(site)
    assert Path(CLIP).name in printed.replace("\n", "")
    assert "gare-1/gare" in printed
