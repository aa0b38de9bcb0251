"""Videos, checkpoints and an index small enough for every test."""

from pathlib import Path

import pytest
import torch
from browser import open_browser
from search_parts import save_checkpoint, write_clip

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.methods import GARE, CLIP4Clip
from tvr_lightning.methods.gare.options import GAREOptions
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight real videos of different colors, two of them in a subfolder."""
    folder = tmp_path_factory.mktemp("gallery")
    for number in range(8):
        write_clip(folder / ("below" if number > 5 else "") / f"clip{number}.mp4", number)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two tiny methods with random weights, as `tvr fit` writes them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for seed, kind in enumerate((GARE, CLIP4Clip)):
        torch.manual_seed(seed)
        encoder = {"width": 64, "image_size": 32, "text_layers": 1, "vision_layers": 1}
        options = {"gare": GAREOptions(temporal_layers=1)} if kind is GARE else {}
        module = kind(TinyClipEncoder(**encoder), words=12, frames=4, **options)
        arguments = {name: module.hparams[name] for name in ("words", "frames", *options)}
        made[kind.__name__.lower()] = save_checkpoint(module, encoder, arguments, folder / f"{kind.__name__}.ckpt")
    return made


@pytest.fixture
def sources(checkpoints: dict[str, Path]) -> list[ScorerSource]:
    pytest.importorskip("lancedb", reason="the extra `search` is not installed")
    return [ScorerSource(str(path)) for path in checkpoints.values()]


@pytest.fixture(scope="session")
def indexed(gallery: Path, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only index of the gallery with both methods and a bank of queries."""
    pytest.importorskip("lancedb", reason="the extra `search` is not installed")
    out = tmp_path_factory.mktemp("indexed") / "index"
    scorers = [ScorerSource(str(path)) for path in checkpoints.values()]
    bank = ["a red square", "something blue", "a cat", "two dogs run", "a man talks"]
    report = index([gallery], out, scorers, bank=bank, batch_size=3, progress=False)
    assert report.added == 8
    return out


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """One browser for all pages; tests open their own address in it."""
    with open_browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def browser(driver):
    """The browser with an empty log, since earlier tests may have logged errors."""
    driver.get("about:blank")
    driver.get_log("browser")
    return driver


@pytest.fixture
def qdrant(monkeypatch, tmp_path):
    """The address of Qdrant's local mode, used instead of a server."""
    client = pytest.importorskip("qdrant_client", reason="the extra `search` is not installed")
    opened = client.QdrantClient
    monkeypatch.setattr(client, "QdrantClient", lambda **_: opened(path=str(tmp_path / "qdrant")))
    return "qdrant://localhost"
