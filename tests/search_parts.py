"""Videos, checkpoints, and clients for the tests of the search."""

import socket
from contextlib import contextmanager

import numpy as np
import torch
from broken_videos import write_video
from browser import serving

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.search.query import SearchQuery

LOCAL = "http://127.0.0.1"
TINY = {"width": 64, "image_size": 32, "text_layers": 1, "vision_layers": 1}
"""Options of a small TinyClipEncoder."""


def write_frames(path, pictures):
    """An mp4 of frames (F, H, W, 3) at 4 per second."""
    height, width = pictures.shape[1:3]
    return write_video(path, len(pictures), rate=4, size=(width, height), picture=lambda number, *_: pictures[number])


def write_clip(path, number, frames=12):
    """An mp4 of `frames` frames at 4 per second whose colors identify its number."""
    pictures, colors = np.zeros((frames, 64, 64, 3), np.uint8), np.random.default_rng(number).integers(0, 255, (2, 3))
    pictures += colors[0].astype(np.uint8)
    for frame, picture in enumerate(pictures):
        picture[8:40, 4 * frame % 48 : 4 * frame % 48 + 16] = colors[1]
    return write_frames(path, pictures)


def save_checkpoint(module, encoder, arguments, path):
    """Write the weights and the plain configuration of a module like `tvr fit`, with the options of TinyClipEncoder."""
    tiny = {"class_path": "tvr_lightning.encoders.TinyClipEncoder", "init_args": encoder}
    hyperparameters = {
        **arguments,
        "encoder": encoder if "class_path" in encoder else tiny,
        "_class_path": f"tvr_lightning.methods.{type(module).__name__}",
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
    }
    content = {"pytorch-lightning_version": "2.6.5", "epoch": 0, "global_step": 0, "state_dict": module.state_dict()}
    torch.save(content | {"hyper_parameters": hyperparameters}, path)
    return path


def save_method(kind, path, encoder, frames, tuning=None, noise=0.0):
    """Write a method with a TinyClipEncoder and random weights like `tvr fit`."""
    torch.manual_seed(1)
    module = kind(TinyClipEncoder(**encoder), frames=frames, words=12, tuning=tuning)
    for parameter in module.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    named = tuning and {"class_path": f"tvr_lightning.encoders.{type(tuning).__name__}", "init_args": vars(tuning)}
    return save_checkpoint(module, encoder, {"frames": frames, "words": 12, "tuning": named}, path)


def by_size(caption, video):
    """Score of a reranker of files."""
    return float(len(caption)) - video.stat().st_size / 1e6


def find(searcher, query="", **options):
    return searcher.search(SearchQuery(query=query, **options))


def find_file(searcher, path, **options):
    """Search by an example clip."""
    return find(searcher, like=searcher.add_example(path), **options)


def app_of(searcher, token=None, **options):
    """The application of `tvr serve` with these options."""
    from tvr_lightning.search.server import ServerOptions, create_app

    return create_app(searcher, ServerOptions(**options), token)


def client_of(searcher, token=None, base_url=LOCAL, **options):
    """A client in this process that follows no redirects."""
    from starlette.testclient import TestClient

    return TestClient(app_of(searcher, token, **options), base_url=base_url, follow_redirects=False)


@contextmanager
def served(searcher, **options):
    """Serve an index over a socket; yields the address of its page."""
    with serving(app_of(searcher, **options)) as address:
        yield address


def connect(address):
    """A connection to a server without HTTP."""
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2].strip("/"))))
