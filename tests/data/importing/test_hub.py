"""Fetching from the hub: against a local stand-in, taken up again where it broke off, and refused in a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import serving

from tvr_lightning.data.importing import ImportFailed
from tvr_lightning.data.importing.hub import fetch
from tvr_lightning.data.importing.run import import_dataset

MSVD = "friedrichor/MSVD"
ARCHIVE = "MSVD_Videos.zip"


@pytest.fixture
def kept(tmp_path) -> Path:
    """What the stand-in keeps: an MSVD of a video per split, its archive, and files that nobody asks for."""
    from data.importing.test_import import write, zipped

    folder = tmp_path / "kept"
    for i, name in enumerate(("train", "val", "test")):
        row = {"video_id": f"clip_{i}_2", "video": f"clip_{i}_2.avi", "caption": ["a dog", "a cat"], "source": "MSVD"}
        write(folder / f"msvd_{name}.json", [row])
    zipped(folder / ARCHIVE, [f"clip_{i}_2.avi" for i in range(3)])
    write(folder / "README.md", "a card")
    return folder


def downloads(hub, name: str) -> list[str | None]:
    return [part for method, path, part in hub.asked if method == "GET" and path.endswith(name)]


def test_what_the_hub_keeps_is_fetched_once_and_imported(kept, tmp_path):
    with serving(MSVD, kept) as hub:
        files = fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert {file.name for file in files} == {path.name for path in kept.iterdir()} - {"README.md"}
        assert all(file.read_bytes() == (kept / file.name).read_bytes() for file in files)
        hub.asked.clear()
        fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert downloads(hub, ARCHIVE) == downloads(hub, "msvd_val.json") == []
        annotations = fetch("msvd", tmp_path / "other", annotations_only=True, endpoint=hub.address)
        assert {file.suffix for file in annotations} == {".json"}
    done = import_dataset("msvd", tmp_path / "got", tmp_path / "data", progress=False)
    assert done.splits == {("", name): (1, 2) for name in ("train", "val", "test")}
    assert (done.new, done.absent) == (3, [])


def test_a_connection_that_breaks_off_is_taken_up_where_it_was(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    with serving(MSVD, kept) as hub:
        hub.breaks_once.add(ARCHIVE)
        fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert (tmp_path / "got" / ARCHIVE).read_bytes() == (kept / ARCHIVE).read_bytes()
        first, second = downloads(hub, ARCHIVE)
    assert first is None
    assert int(str(second).removeprefix("bytes=").rstrip("-")) > 10_000


def test_a_failed_fetch_is_a_sentence_and_the_same_call_goes_on(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serving(MSVD, kept) as hub:
        hub.breaks_off.add("msvd_val.json")
        with pytest.raises(ImportFailed, match=r"friedrichor/MSVD could not be downloaded from http://127\.0\.0\.1"):
            fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert not (tmp_path / "got" / "msvd_val.json").exists()
        hub.breaks_off.clear()
        hub.asked.clear()
        fetch("msvd", tmp_path / "got", endpoint=hub.address)
        assert downloads(hub, ARCHIVE) == []  # it was whole
        assert len(downloads(hub, "msvd_val.json")) == 1


def test_without_a_network_or_a_repository_there_is_one_sentence(kept, tmp_path):
    with pytest.raises(ImportFailed, match=r"could not be downloaded from http://127\.0\.0\.1:9 \(.*docs/datasets\.md"):
        fetch("msvd", tmp_path / "got", endpoint="http://127.0.0.1:9")
    only = "lsmdc cannot be downloaded from the Hub, only msrvtt, msvd, didemo, activitynet"
    with pytest.raises(ImportFailed, match=only):
        fetch("lsmdc", tmp_path / "got")
    gone = "friedrichor/MSVD on the Hub is no longer public"
    with serving("somebody/else", kept) as hub, pytest.raises(ImportFailed, match=gone):
        fetch("msvd", tmp_path / "got", endpoint=hub.address)
    with serving(MSVD, kept) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10})())
        with pytest.raises(ImportFailed, match=r"has 0\.0 GB of free space, but .* are needed"):
            fetch("msvd", tmp_path / "got", endpoint=hub.address)
    assert not [path for path in (tmp_path / "got").rglob("*") if path.is_file()]


def test_the_command_asks_the_hub_that_the_environment_names(kept, tmp_path):
    with serving(MSVD, kept) as hub:
        command = [sys.executable, "-m", "tvr_lightning.cli", "data", "download", "msvd", "--out=got"]
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "4 files (0.00 GB) are in got. Next: tvr data import msvd --from got" in done.stdout
