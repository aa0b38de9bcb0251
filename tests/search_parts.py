"""What the tests of the search build their indexes from."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from browser import serving

from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.query import SearchQuery
from tvr_lightning.search.results import Answer

LOCAL = "http://127.0.0.1"


def write_frames(path: Path, pictures: np.ndarray) -> Path:
    """An mp4 of frames (F, H, W, 3) at 4 per second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def write_clip(path: Path, number: int, frames: int = 12) -> Path:
    """A real mp4 of `frames` frames at 4 per second whose colors identify its number."""
    pictures, colors = np.zeros((frames, 64, 64, 3), np.uint8), np.random.default_rng(number).integers(0, 255, (2, 3))
    pictures += colors[0].astype(np.uint8)
    for frame, picture in enumerate(pictures):
        picture[8:40, 4 * frame % 48 : 4 * frame % 48 + 16] = colors[1]
    return write_frames(path, pictures)


def save_checkpoint(module: RetrievalModule, encoder: dict[str, Any], arguments: dict[str, Any], path: Path) -> Path:
    """Write a module as `tvr fit` does: its weights and plain configuration."""
    hyperparameters = {
        **arguments,
        "encoder": {"class_path": "tvr_lightning.encoders.TinyClipEncoder", "init_args": encoder},
        "_class_path": f"tvr_lightning.methods.{type(module).__name__}",
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
    }
    content = {"pytorch-lightning_version": "2.6.5", "epoch": 0, "global_step": 0, "state_dict": module.state_dict()}
    torch.save(content | {"hyper_parameters": hyperparameters}, path)
    return path


def find(searcher: Searcher, query: str = "", **options: Any) -> Answer:
    """Search with a query of these parameters."""
    return searcher.search(SearchQuery(query=query, **options))


def find_file(searcher: Searcher, path: Path, **options: Any) -> Answer:
    """Search by an example clip."""
    return find(searcher, like=searcher.add_example(path), **options)


def app_of(searcher: Searcher, token: str | None = None, **options: Any) -> Any:
    """The application of `tvr serve` with these options."""
    from tvr_lightning.search.server import ServerOptions, create_app

    return create_app(searcher, ServerOptions(**options), token)


def client_of(searcher: Searcher, token: str | None = None, base_url: str = LOCAL, **options: Any) -> Any:
    """A client in this process that follows no redirects."""
    from starlette.testclient import TestClient

    return TestClient(app_of(searcher, token, **options), base_url=base_url, follow_redirects=False)


@contextmanager
def served(searcher: Searcher, **options: Any) -> Iterator[str]:
    """Serve an index over a socket; gives the address of its page."""
    with serving(app_of(searcher, **options)) as address:
        yield address


def connect(address: str) -> socket.socket:
    """A connection to a server without HTTP."""
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2].strip("/"))))
