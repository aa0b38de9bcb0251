"""The wheel, which contains the recipes, tables, and search page that a user needs, and the container of the search."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from search_parts import TINY, save_method, write_clip
from small_run import small_run

from tvr_lightning.methods import XPool

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


def test_the_container_copies_existing_files_and_installs_with_the_constraints():
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert {"setup.py", "recipes", "tvr_lightning", "constraints.txt"} <= set(copied)
    assert [path for path in copied if not (ROOT / path).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {f"!{path.split('/')[0]}" for path in copied} <= set(ignored)
    assert "--constraint /source/constraints.txt" in text


@pytest.mark.slow
def test_the_script_of_the_container_indexes_and_serves_and_names_missing_variables(tmp_path, ended):
    pytest.importorskip("lancedb")
    pytest.importorskip("uvicorn")
    save_method(XPool, tmp_path / "last.ckpt", TINY, 2)
    write_clip(tmp_path / "videos" / "a.mp4", 1)
    program = tmp_path / "bin" / "tvr"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tvr_lightning.cli "$@"\n')
    program.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TVR_PORT": str(port),
        "TVR_INDEX": str(tmp_path / "index"), "TVR_HOST": "0.0.0.0", "TVR_CHECKPOINT": str(tmp_path / "last.ckpt"),
        "TVR_SEARCH_TOKEN": "secret",
    }  # fmt: skip
    command = ["sh", str(ROOT / "docker" / "search.sh"), "--num_workers", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "TVR_VIDEOS: names the folder of the videos" in done.stderr
    environment["TVR_VIDEOS"] = str(tmp_path / "videos")
    server = ended(subprocess.Popen(command, env=environment, start_new_session=True))
    address, until, answer = f"http://127.0.0.1:{port}/api/search?query=a%20red%20star", time.monotonic() + 240, None
    request = urllib.request.Request(address, headers={"Authorization": "Bearer secret"})
    while answer is None and time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read()) from error
        except OSError:
            time.sleep(0.5)
    assert answer is not None, f"no answer; the script ended with {server.poll()}"
    assert [Path(result["path"]).name for result in answer["results"]] == ["a.mp4"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(address, timeout=20)
    server.terminate()
    server.wait(30)


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
