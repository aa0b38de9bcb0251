"""Models small enough to build in a test: registered with open_clip by name as a user would, or saved in folders."""

import functools
import json

import open_clip
import pytest
from small_towers import save_model

TEXT = {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2}
VISION = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 16}
ARCHITECTURES = {
    "tvr-test": {"embed_dim": 64, "vision_cfg": VISION, "text_cfg": TEXT},
    "tvr-test-quickgelu": {"embed_dim": 64, "quick_gelu": True, "vision_cfg": VISION, "text_cfg": TEXT},
    "tvr-test-custom": {"embed_dim": 64, "custom_text": True, "vision_cfg": VISION, "text_cfg": TEXT},
    "tvr-test-77": {"embed_dim": 64, "vision_cfg": VISION, "text_cfg": {**TEXT, "context_length": 77}},
    "tvr-test-custom-77": {
        "embed_dim": 64, "custom_text": True, "vision_cfg": VISION, "text_cfg": {**TEXT, "context_length": 77},
    },
    "tvr-test-bidirectional": {
        "embed_dim": 32, "custom_text": True, "vision_cfg": VISION,
        "text_cfg": {**TEXT, "no_causal_mask": True, "proj_bias": True},
    },
    "tvr-test-resnet": {
        "embed_dim": 64, "text_cfg": TEXT,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None},
    },
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def small_architectures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("architectures")
    for name, configuration in ARCHITECTURES.items():
        (folder / f"{name}.json").write_text(json.dumps(configuration))
    open_clip.add_model_config(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Name of a saved model of a kind of `small_towers`, read-only."""
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda kind: save_model(kind, root / kind))
