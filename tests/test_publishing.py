"""The container of the search."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from search_parts import TINY, save_method, write_clip

from tvr_lightning.methods import XPool

ROOT = Path(__file__).parent.parent


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
