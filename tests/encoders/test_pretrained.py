"""Search for pretrained weights, tokenizers and preprocessing, without a network."""

import json
import logging
import time
import urllib.request

import huggingface_hub
import open_clip
import pytest
from open_clip.transform import PreprocessCfg

from tvr_lightning.encoders import ClipEncoder, TinyClipEncoder, TinyWhisperEncoder, Wav2Vec2Encoder, WhisperEncoder
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import find_weights


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
