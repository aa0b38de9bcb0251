"""What the tests of the search build their indexes from."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.query import SearchQuery
from tvr_lightning.search.results import Answer


def write_clip(path: Path, number: int, frames: int = 12) -> Path:
    """A real mp4 of `frames` frames at 4 per second whose colours tell its number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(number)
    colours = generator.integers(0, 255, (2, 3))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for frame in range(frames):
            picture = np.zeros((64, 64, 3), dtype=np.uint8) + colours[0].astype(np.uint8)
            picture[8:40, 4 * frame % 48 : 4 * frame % 48 + 16] = colours[1]
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def save_checkpoint(module: RetrievalModule, encoder: dict[str, Any], arguments: dict[str, Any], path: Path) -> Path:
    """Write a module as `tvr fit` does: its weights and plain configuration."""
    content = {
        "pytorch-lightning_version": "2.6.5",
        "epoch": 0,
        "global_step": 0,
        "state_dict": module.state_dict(),
        "hyper_parameters": {
            **arguments,
            "encoder": {"class_path": "tvr_lightning.encoders.TinyClipEncoder", "init_args": encoder},
            "_class_path": f"tvr_lightning.methods.{type(module).__name__}",
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
        },
    }
    torch.save(content, path)
    return path


FOREIGN_FILES = ("vectors.d/mine.txt", "vectors.txt", "catalog.sqlite.bak")
"""Files of the user whose names begin like those of an index."""


def write_foreign_files(folder: str | Path) -> None:
    for name in FOREIGN_FILES:
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")


def foreign_files_are_intact(folder: Path) -> bool:
    return all((folder / name).is_file() and (folder / name).read_text() == "mine" for name in FOREIGN_FILES)


def find(searcher: Searcher, query: str = "", **options: Any) -> Answer:
    """Search with a query of these parameters."""
    return searcher.search(SearchQuery(query=query, **options))


def find_file(searcher: Searcher, path: Path, **options: Any) -> Answer:
    """Search by an example clip."""
    return find(searcher, like=searcher.add_example(path), **options)
