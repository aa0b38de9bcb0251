"""`tvr search` asks a running `tvr serve` of the same index, and does without one that is dead, stuck or of another."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from browser import serving

pytest.importorskip("fastapi", reason="the extra `search` is not installed")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
pytest.importorskip("httpx", reason="httpx drives the application in tests")
from starlette.testclient import TestClient

from tvr_lightning.cli import main
from tvr_lightning.files import user_state
from tvr_lightning.search import Searcher, SearchError, running
from tvr_lightning.search.local import LocalIndex
from tvr_lightning.search.question import Question
from tvr_lightning.search.running import HEADER, ROUTE, announced, ask
from tvr_lightning.search.server import ServerOptions, create_app

KEY = "key of the owner"


@pytest.fixture(scope="module")
def searcher(indexed):
    with Searcher(indexed) as made:
        yield made


@contextmanager
def served(searcher, folder, token=None):
    with serving(create_app(searcher, ServerOptions(), token, KEY)) as address:
        port = int(address.rpartition(":")[2].strip("/"))
        with announced(folder, "127.0.0.1", port, KEY):
            yield port


def entries():
    return sorted((user_state() / "servers").glob("*"))


def test_a_running_server_answers_as_the_index_does_and_needs_no_torch(searcher, indexed, gallery):
    program = "import sys; from tvr_lightning.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    words = ["search", "a", "red", "square", "--index", str(indexed), "--top", "3", "--json"]
    by_example = Question("", str(gallery / "clip2.mp4"), top=2, shortest=1.0)
    with served(searcher, indexed, token="for others"):
        (file,) = entries()
        assert file.stat().st_mode & 0o077 == 0, "the key is the user's own"
        said = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
        assert ask(indexed, by_example) == by_example.ask(LocalIndex(searcher, public=False))
    answer, _, imported = said.stdout.rpartition("}")
    assert imported.strip() == "False"
    assert json.loads(answer + "}") == searcher.search("a red square", 3).plain()
    assert not entries()


def test_what_a_server_refuses_is_said_in_its_sentence(searcher, indexed, capsys, tmp_path):
    with served(searcher, indexed):
        assert main(["search", "a", "--index", str(indexed), "--rerank", "gar"]) == 1
        assert "the index has no scorer 'gar'" in capsys.readouterr().err
        (tmp_path / "clip.mp4").write_bytes(b"no video")
        with pytest.raises(SearchError, match="cannot be opened as video"):
            ask(indexed, Question("", str(tmp_path / "clip.mp4")))


def test_options_that_say_how_to_open_an_index_open_it(indexed, monkeypatch, capsys):
    monkeypatch.setattr("tvr_lightning.verbs.search.ask", lambda *_: pytest.fail("asked a server"))
    assert main(["search", "a", "--index", str(indexed), "--device", "cpu", "--top", "1"]) == 0
    assert "  1. " in capsys.readouterr().out


def test_only_the_owner_s_key_opens_the_owner_s_address(searcher):
    client = TestClient(create_app(searcher, ServerOptions(), "token", KEY), base_url="http://127.0.0.1")
    question = Question("a").plain()
    for headers in ({}, {HEADER: "guess"}, {"Authorization": "Bearer token"}):
        assert client.post(ROUTE, json=question, headers=headers).status_code == 401
    assert client.post(ROUTE, json=question, headers={HEADER: KEY}).status_code == 200
    without = TestClient(create_app(searcher, ServerOptions()), base_url="http://127.0.0.1")
    assert without.post(ROUTE, json=question, headers={HEADER: ""}).status_code in (404, 405)


def test_a_server_that_was_killed_is_forgotten(indexed):
    with announced(indexed, "127.0.0.1", 9, KEY):
        (file,) = entries()
        dead = file.with_name(file.name.replace(f"-{os.getpid()}-", "-1-"))
        shutil.copy(file, dead)
        assert ask(indexed, Question("a")) is None, "nothing listens on that port"
        assert entries() == [file]


def test_a_server_that_hangs_is_given_up(indexed, monkeypatch):
    monkeypatch.setattr(running, "TO_CONNECT", 0.2)
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, announced(indexed, "127.0.0.1", silent.getsockname()[1], KEY):
        assert ask(indexed, Question("a")) is None


def test_a_copy_of_the_index_is_another_one(searcher, indexed, tmp_path):
    shutil.copytree(indexed, tmp_path / "copy")
    with served(searcher, indexed):
        assert ask(tmp_path / "copy", Question("a")) is None
        assert ask(tmp_path / "nowhere", Question("a")) is None
        (tmp_path / "link").symlink_to(indexed)
        assert ask(tmp_path / "link", Question("a")) is not None
