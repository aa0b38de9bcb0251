"""CLIP towers compared with the authors' code, and the layouts of their weights."""

import logging

import open_clip
import pytest
import torch
from encoders.openai_state import openai_encoder
from safetensors.torch import save_file

from tvr_lightning.encoders import ClipEncoder


@pytest.fixture(scope="module")
def tensors():
    """Weights under OpenAI's names for the architecture `tvr-test`, with a logit scale of 4.25."""
    torch.manual_seed(0)
    model = open_clip.CLIP(**open_clip.get_model_config("tvr-test"))
    return {**model.state_dict(), "logit_scale": torch.tensor(4.25)}


@pytest.fixture
def pixels():
    return torch.randn(2, 3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layout", ["archive", "half", "extra", "plain", "safetensors", "open_clip"])
def test_every_layout_gives_the_same_features(tensors, tmp_path, pixels, layout):
    path = tmp_path / ("weights.safetensors" if layout == "safetensors" else "weights.pt")
    rounded = {name: t if "ln_" in name or "logit" in name else t.half().float() for name, t in tensors.items()}
    # OpenAI's own layouts imply QuickGELU
    architecture = "tvr-test" if layout in ("archive", "half", "extra") else "tvr-test-quickgelu"
    if layout == "archive":
        model = open_clip.CLIP(**open_clip.get_model_config("tvr-test"))
        model.load_state_dict(rounded)
        model.register_buffer("input_resolution", torch.tensor(32))  # as OpenAI's archives have it
        example = (torch.zeros(1, 3, 32, 32), torch.zeros(1, 16, dtype=torch.int64))
        torch.jit.save(torch.jit.trace(model.eval(), example, check_trace=False), path)
    elif layout == "half":
        torch.save({n: t if "ln_" in n or "logit" in n else t.half() for n, t in rounded.items()}, path)
    elif layout == "extra":
        torch.save({**rounded, "vocab_size": torch.tensor(49408)}, path)
    elif layout == "safetensors":
        save_file(rounded, path)
    else:
        wrapped = {"epoch": 3, "state_dict": {f"module.{name}": tensor for name, tensor in rounded.items()}}
        torch.save(wrapped if layout == "open_clip" else rounded, path)
    encoder = ClipEncoder(architecture, str(path))
    reference = openai_encoder(rounded)
    ids = torch.tensor([[49406, 320, 2368, 49407, 0, 0]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(encoder.encode_tokens(ids).words, reference.encode_tokens(ids).words)
    assert torch.equal(encoder.encode_pixels(pixels, mask).frames, reference.encode_pixels(pixels, mask).frames)
    assert encoder.initial_logit_scale() == 4.25
    assert encoder.fingerprint() == reference.fingerprint()


def test_weights_without_an_activation_use_that_of_the_architecture(tensors, tmp_path, caplog):
    torch.save(tensors, tmp_path / "weights.pt")
    with caplog.at_level(logging.WARNING):
        plain = ClipEncoder("tvr-test", str(tmp_path / "weights.pt"))
    assert "Using GELU, as in the architecture tvr-test" in caplog.text
    assert plain.configuration()["activations"] == ["GELU"]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        quick = ClipEncoder("tvr-test-quickgelu", str(tmp_path / "weights.pt"))
    assert not caplog.records
    assert quick.configuration()["activations"] == ["QuickGELU"]
    with caplog.at_level(logging.WARNING):
        encoder = ClipEncoder("tvr-test", None)
    assert "RANDOM" in caplog.text
    assert encoder.initial_logit_scale() == pytest.approx(torch.tensor(1 / 0.07).log().item())


def test_weights_without_the_names_of_openai_are_refused():
    with pytest.raises(ValueError, match="not an OpenAI CLIP state dict"):
        openai_encoder({"weight": torch.ones(3)})
