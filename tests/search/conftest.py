"""Videos, checkpoints and an index small enough for every test."""

import multiprocessing
import socket
from importlib.util import find_spec

import pytest
import torch
from search_parts import TINY, save_checkpoint, write_clip

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.media.workers import start_method
from tvr_lightning.methods import GARE, CLIP4Clip
from tvr_lightning.methods.gare.options import GAREOptions
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource

if not all(map(find_spec, ("lancedb", "fastapi", "uvicorn", "httpx"))):
    collect_ignore_glob = ["test_*.py"]  # the extra `search` is not installed


@pytest.fixture(scope="session")
def gallery(tmp_path_factory):
    """A folder of eight real videos of different colors, two of them in a subfolder."""
    folder = tmp_path_factory.mktemp("gallery")
    for number in range(8):
        write_clip(folder / ("below" if number > 5 else "") / f"clip{number}.mp4", number)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Checkpoints of two tiny methods with random weights, as `tvr fit` writes them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {}
    for seed, kind in enumerate((GARE, CLIP4Clip)):
        torch.manual_seed(seed)
        options = {"gare": GAREOptions(temporal_layers=1)} if kind is GARE else {}
        module = kind(TinyClipEncoder(**TINY), words=12, frames=4, **options)
        arguments = {name: module.hparams[name] for name in ("words", "frames", *options)}
        paths[kind.__name__.lower()] = save_checkpoint(module, TINY, arguments, folder / f"{kind.__name__}.ckpt")
    return paths


@pytest.fixture(scope="session")
def sources(checkpoints):
    return [ScorerSource(str(path)) for path in checkpoints.values()]


@pytest.fixture(scope="session")
def ckpt(checkpoints):
    """The option that names the checkpoint of CLIP4Clip."""
    return ["--ckpt_path", str(checkpoints["clip4clip"])]


@pytest.fixture(scope="session")
def indexed(gallery, sources, tmp_path_factory):
    """A read-only index of the gallery with both methods and a bank of queries."""
    out = tmp_path_factory.mktemp("indexed") / "index"
    bank = ["a red square", "something blue", "a cat", "two dogs run", "a man talks"]
    assert index([gallery], out, sources, bank=bank, batch_size=3, progress=False).added == 8
    return out


@pytest.fixture(scope="session")
def small_index(gallery, sources, tmp_path_factory):
    """A read-only index of the gallery with CLIP4Clip, which opens faster."""
    out = tmp_path_factory.mktemp("small") / "index"
    index([gallery], out, sources[1:], progress=False)
    return out


@pytest.fixture(scope="session")
def searcher(indexed):
    with Searcher(indexed) as searcher:
        yield searcher


@pytest.fixture
def browser(driver):
    """The browser with an empty log, since earlier tests may have logged errors."""
    driver.get("about:blank")
    driver.get_log("browser")
    return driver


@pytest.fixture
def no_network(monkeypatch):
    """Addresses to which a connection was attempted."""
    asked = []

    def refuse(_, address):
        asked.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: refuse(None, host))
    return asked


@pytest.fixture
def interpreter(ended):
    """Run Python code in a process of the server that has imported the package, since LanceDB must not be forked."""

    def start(code):
        process = multiprocessing.get_context(start_method()).Process(target=exec, args=(code, {}))
        process.start()
        return ended(process)

    return start
