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


class Installed:
    """The wheel, installed by pip into a folder that is added to the packages of this Python."""

    def __init__(self, folder: Path) -> None:
        source, self.site, self.home = folder / "source", folder / "site", folder / "home"
        self.home.mkdir()
        source.mkdir()
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        for name in ("tvr_lightning", "recipes"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        self.run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
        (self.wheel,) = folder.glob("*.whl")
        self.run(*pip, "install", "--quiet", "--no-deps", "--target", str(self.site), str(self.wheel))
        shutil.rmtree(source)

    def run(self, *command: str) -> str:
        """Run a command outside the checkout, and return what it printed."""
        kept = {name: value for name, value in os.environ.items() if name not in ("TVR_DATA", "PYTHONPATH")}
        environment = kept | {"PYTHONPATH": str(self.site), "XDG_STATE_HOME": str(self.home / "state")}
        done = subprocess.run(command, cwd=self.home, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_contains_every_recipe(installed):
    def names(folder):
        return {path.relative_to(folder) for path in folder.rglob("*.yaml")}

    assert names(installed.site / "tvr_lightning" / "recipes") == names(ROOT / "recipes")
    schema = json.loads((installed.site / "tvr_lightning" / "recipes" / "schema.json").read_text(encoding="utf-8"))
    assert "CLIP4ClipOptions" in schema["$defs"]


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
def test_fit_index_and_search_outside_a_checkout(installed):
    checkpoint = "runs/clip4clip-msrvtt/version_0/checkpoints/last.ckpt"
    clip = "fixture/msrvtt/videos/video0.mp4"
    small = small_run(Path("fixture"), Path("runs"))
    commands = [
        ["data", "synth", "msrvtt", "--videos", "12", "--num_workers", "1"],
        ["fit", *small],
        ["index", clip, "--out", "index", "--ckpt_path", checkpoint],
        ["search", "a red star", "--index", "index"],
        ["reproduce", "gare-1", "--only", "gare", "--dry_run"],
    ]
    printed = installed.run(sys.executable, "-c", PROGRAM, json.dumps(commands))
    assert Path(printed.splitlines()[0]).is_relative_to(installed.site)
    assert Path(clip).name in printed.replace("\n", "")
    assert "gare-1/gare" in printed
