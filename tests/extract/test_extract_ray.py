"""Extraction on Ray writes the same store as one machine; without Ray, the error names the package to install."""

import importlib.util
import shutil

import pytest
import torch

from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.extract.plan import ExtractOptions, source_of_data
from tvr_lightning.extract.run import extract
from tvr_lightning.store import FeatureStore
from tvr_lightning.synthetic import synthesize

HAS_RAY = importlib.util.find_spec("ray") is not None


def source(root):
    return source_of_data(MSRVTT(root=str(root), frames=2, words=12, image_size=32, batch_size=4, num_workers=0))


def encoder():
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1).requires_grad_(False)


def options(out, **changes):
    return ExtractOptions(str(out), batch_size=2, shard_size=4, num_workers=0, progress=False, **changes)


@pytest.fixture
def root(tmp_path):
    synthesize("msrvtt", tmp_path / "data", 9, 0, workers=1, progress=False)
    return tmp_path / "data"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore")  # what Ray's own libraries deprecate
def test_ray_gives_the_store_of_one_machine_and_takes_up_an_interrupted_one(root, tmp_path):
    broken = next(root.rglob("*.mp4"))
    broken.write_bytes(b"no video")
    local = extract(source(root), encoder(), None, options(tmp_path / "local"))
    ray = extract(source(root), encoder(), None, options(tmp_path / "ray", engine="ray", actors=2))
    assert ray.written == local.written
    assert ray.skipped == local.skipped
    stores = [FeatureStore(tmp_path / name) for name in ("local", "ray")]
    shards = [{p.name: p.read_bytes() for p in (tmp_path / n / "shards").rglob("*")} for n in ("local", "ray")]
    assert shards[0] == shards[1]
    assert len(stores[0]) == len(stores[1]) == 8
    again = extract(source(root), encoder(), None, options(tmp_path / "ray", engine="ray"))
    assert not any(again.written.values())
    shutil.rmtree(tmp_path / "local")


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_error_names_the_extra(root, tmp_path):
    with pytest.raises(UserError, match=r"pip install 'tvr-lightning\[ray\]'"):
        extract(source(root), encoder(), None, options(tmp_path / "store", engine="ray"))
