"""Pretrained weights: their search without a network, and files in every layout, none of which can run code."""

import json
import logging
import pickle
import time
import urllib.request
import zipfile

import huggingface_hub
import open_clip
import pytest
import torch
from encoders.parts import openai_encoder
from open_clip.transform import PreprocessCfg
from safetensors.torch import save_file
from torch import nn

from tvr_lightning.encoders import ClipEncoder, TinyClipEncoder, TinyWhisperEncoder, Wav2Vec2Encoder, WhisperEncoder
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import find_weights
from tvr_lightning.encoders.weights import load_weights, read_state_dict, read_torchscript


@pytest.fixture
def refused_network(monkeypatch, tmp_path):
    """A proxy that refuses connections, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the discard port
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # which keeps the proxies
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


@pytest.mark.usefixtures("refused_network")
def test_tags_are_found_in_the_cache_or_reported_quickly(tmp_path):
    snapshot = tmp_path / "hub/models--timm--vit_base_patch32_clip_224.openai/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "open_clip_model.safetensors").write_bytes(b"stands for the weights")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("abc")
    source = find_weights("ViT-B-32", "openai")
    assert source.path == snapshot / "open_clip_model.safetensors"
    assert (source.quick_gelu, source.pixels.mean[0]) == (True, pytest.approx(0.48145466))
    began = time.monotonic()
    with pytest.raises(MissingWeightsError) as missed:
        find_weights("ViT-L-14", "openai")
    seconds, message = time.monotonic() - began, str(missed.value)
    places = (str(tmp_path / "hub"), str(tmp_path / ".cache/clip/ViT-L-14.pt"), "huggingface.co", "openaipublic")
    for part in ("'openai' for ViT-L-14", *places, "recipes/fixture.yaml"):
        assert part in message
    assert len(message.replace(str(tmp_path), "~")) <= 240, "two lines of a terminal"
    assert seconds < 30


@pytest.mark.parametrize(
    ("architecture", "weights", "error", "message"),
    [
        ("ViT-B-32-quickgelu", "laion2b_s34b_b79k", ValueError, "QuickGELU mismatch.*Use the architecture ViT-B-32$"),
        ("ViT-B-32", "absent/ViT-B-32.pt", MissingWeightsError, "absent/ViT-B-32.pt"),
        ("ViT-B-32", "openia", ValueError, r"no open_clip tag of ViT-B-32.*laion2b_s34b_b79k.*openai"),
        ("ViT-B32", None, ValueError, r"'ViT-B32' is unknown.*ViT-B-32"),
    ],
)
def test_missing_weights_and_wrong_names_are_reported(architecture, weights, error, message):
    with pytest.raises(error, match=message):
        find_weights(architecture, weights)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network and no cache, as on a machine in a cluster."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("offline")
def test_missing_tokenizers_and_text_towers_are_reported(tmp_path):
    tokenizer = (
        r"the tokenizer timm/ViT-B-16-SigLIP of ViT-B-16-SigLIP is missing: looked in .*cache\. .*"
        r"hf download timm/ViT-B-16-SigLIP`, or name a folder: encoder\.tokenizer="
    )
    tower = r"roberta-ViT-B-32's text tower roberta-base is missing"
    for create in (ClipEncoder, ClipEncoder.required_files):
        for architecture, message in (("ViT-B-16-SigLIP", tokenizer), ("roberta-ViT-B-32", tower)):
            with pytest.raises(MissingWeightsError, match=message):
                create(architecture=architecture, weights=None)
    with pytest.raises(MissingWeightsError, match=r"tokenizer .* of ViT-B-16-SigLIP is missing: .* contains none of"):
        ClipEncoder("ViT-B-16-SigLIP", None, tokenizer=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"encoder\.language is zho_Hans, but the tokenizer of ViT-B-32 has no language"
    ):
        ClipEncoder("ViT-B-32", None, language="zho_Hans")


def test_a_folder_contains_configuration_and_weights(tmp_path):
    name = f"local-dir:{tmp_path / 'mine'}"
    with pytest.raises(MissingWeightsError, match=r"mine/open_clip_config\.json"):
        find_weights(name, None)
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine/open_clip_config.json"
    for content in ("{", "{}", "[]"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"open_clip_config\.json is not a configuration that open_clip saved"):
            find_weights(name, None)
    path.write_text(json.dumps({"model_cfg": open_clip.get_model_config("tvr-test"), "preprocess_cfg": {}}))
    assert find_weights(name, None).pixels == PreprocessCfg()
    with pytest.raises(ValueError, match=r"encoder\.weights is 'openai', but local-dir:.* has no tags. Use folder"):
        find_weights(name, "openai")
    with pytest.raises(MissingWeightsError, match=r"mine contains neither open_clip_model\.safetensors nor"):
        find_weights(name, "folder")


def test_preprocessing_is_that_of_the_tags_or_must_be_named(tmp_path, caplog):
    pe = PreprocessCfg(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear", resize_mode="squash")
    for architecture, pixels in (("PE-Core-B-16", pe), ("ViT-B-32", PreprocessCfg())):
        for weights in (None, "none"):
            source = find_weights(architecture, weights)
            assert (source.path, source.pixels) == (None, pixels)
    path = tmp_path / "weights.pt"
    path.touch()
    with caplog.at_level(logging.WARNING):
        assert find_weights("ViT-H-14", str(path)).pixels.resize_mode == "shortest"
    assert "Set encoder.preprocessing to the tag that it was published under: laion2b_s32b_b79k" in caplog.text
    caplog.clear()
    assert find_weights("ViT-H-14", str(path), "dfn5b").pixels.resize_mode == "squash"
    assert not caplog.records
    with pytest.raises(ValueError, match=r"encoder\.preprocessing is 'dfn'; the tags of ViT-H-14: .*dfn5b"):
        find_weights("ViT-H-14", str(path), "dfn")


def test_encoders_list_their_required_files(tmp_path, monkeypatch):
    weights = tmp_path / "some.pt"
    with pytest.raises(MissingWeightsError, match=r"some\.pt"):
        WhisperEncoder.required_files(weights=str(weights))
    weights.touch()
    assert ClipEncoder.required_files(weights=str(weights), text_mask=True) == [weights]
    assert WhisperEncoder.required_files(size="small", weights=str(weights)) == [weights]
    assert TinyClipEncoder.required_files(trained_in=str(weights)) == [weights]
    (tmp_path / "model.safetensors").touch()
    assert Wav2Vec2Encoder.required_files(weights=str(tmp_path)) == [tmp_path / "config.json"]
    for kind in (ClipEncoder, WhisperEncoder, Wav2Vec2Encoder):
        assert kind.required_files(weights=None) == []
    assert TinyWhisperEncoder.required_files(width=64) == TinyClipEncoder.required_files() == []


def clip():
    return open_clip.CLIP(**open_clip.get_model_config("tvr-test"))


@pytest.fixture(scope="module")
def tensors():
    """Weights under OpenAI's names for the architecture `tvr-test`, with a logit scale of 4.25."""
    torch.manual_seed(0)
    return {**clip().state_dict(), "logit_scale": torch.tensor(4.25)}


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layout", ["archive", "half", "extra", "plain", "safetensors", "open_clip"])
def test_every_layout_gives_the_same_features(tensors, tmp_path, layout):
    path = tmp_path / ("weights.safetensors" if layout == "safetensors" else "weights.pt")
    rounded = {name: t if "ln_" in name or "logit" in name else t.half().float() for name, t in tensors.items()}
    # OpenAI's own layouts imply QuickGELU
    architecture = "tvr-test" if layout in ("archive", "half", "extra") else "tvr-test-quickgelu"
    if layout == "archive":
        model = clip()
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
    pixels, mask = torch.randn(2, 3, 3, 32, 32), torch.ones(2, 3, dtype=torch.bool)
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


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        self.in_half = nn.Parameter(torch.randn(4, 2).half())
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.register_buffer("vocab_size", torch.tensor(12))
        self.remark = torch.tensor(3.0)  # neither parameter nor buffer

    def forward(self, x):
        return self.layers(x) @ self.in_half.float(), self.transposed * self.remark


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_a_torchscript_archive_has_the_tensors_of_its_module(tmp_path):
    expected, path = Parts(), tmp_path / "parts.pt"
    torch.jit.save(torch.jit.trace(expected, torch.ones(1, 3)), path)
    tensors = read_torchscript(path)
    assert tensors.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    torch.save({"a": torch.ones(2)}, tmp_path / "plain.pt")
    (tmp_path / "text.pt").write_text("no weights")
    assert read_torchscript(tmp_path / "plain.pt") is read_torchscript(tmp_path / "text.pt") is None


def test_code_in_a_file_of_weights_does_not_run(tmp_path):
    call = f"cos\nmkdir\n(V{tmp_path / 'ran'}\ntR.".encode()  # a pickle that creates a folder
    (tmp_path / "evil.pt").write_bytes(call)
    with pytest.raises(ValueError, match=r"evil\.pt cannot be read as weights"):
        read_state_dict(tmp_path / "evil.pt")
    with zipfile.ZipFile(tmp_path / "archive.pt", "w") as archive:
        archive.writestr("evil/data.pkl", call)
        archive.writestr("evil/constants.pkl", b"")
    with pytest.raises(pickle.UnpicklingError, match="which weights do not need"):
        read_torchscript(tmp_path / "archive.pt")
    assert not (tmp_path / "ran").exists()


def test_damaged_and_other_files_are_refused(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 cut short")
    (tmp_path / "empty.pt").touch()
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    (tmp_path / "captions.csv").write_text("key,video\n")
    archive = bytearray((tmp_path / "list.pt").read_bytes())
    archive[archive.rfind(b"PK\x01\x02")] ^= 1  # in the zip file's table of contents
    (tmp_path / "flipped.pt").write_bytes(archive)
    for name in ("cut.safetensors", "cut.pt", "empty.pt", "captions.csv", "flipped.pt"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read as weights \((?!.*weights_only)"):
            read_state_dict(tmp_path / name)
    with pytest.raises(ValueError, match=r"list\.pt contains a list"):
        read_state_dict(tmp_path / "list.pt")
    torch.save({0: torch.ones(2), "args": 3}, tmp_path / "mixed.pt")
    with pytest.raises(ValueError, match=r"mixed\.pt: these entries are not named tensors: 0, args;"):
        read_state_dict(tmp_path / "mixed.pt")
    with pytest.raises(ValueError, match=r"absent\.pt: no such file"):
        read_state_dict(tmp_path / "absent.pt")


def test_tensors_that_do_not_fit_are_listed(tensors):
    model = clip()
    wrong = {name: tensor for name, tensor in tensors.items() if name != "ln_final.weight"}
    wrong["head.weight"] = torch.ones(2, 3)
    wrong["visual.proj"] = torch.ones(64, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"file.pt does not fit") as error:
        load_weights(model, wrong, "file.pt")
    for part in (
        "1 missing: ln_final.weight (64,)",
        "1 unexpected: head.weight (2, 3)",
        "1 of another shape: visual.proj: expected (64, 64), found (64, 32)",
    ):
        assert part in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    # Tensors with OpenAI's names are loaded into a model with a text module.
    configuration = open_clip.get_model_config("tvr-test-custom")
    custom = open_clip.CustomTextCLIP(**{k: v for k, v in configuration.items() if k != "custom_text"})
    load_weights(custom, {**tensors, "logit_scale": tensors["logit_scale"].reshape(1)}, "file.pt")
    assert torch.equal(custom.text.token_embedding.weight, tensors["token_embedding.weight"])
    assert torch.equal(custom.visual.proj, tensors["visual.proj"])
    assert torch.equal(custom.logit_scale, tensors["logit_scale"])
