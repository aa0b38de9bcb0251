import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tvr_lightning.recipe
from tvr_lightning.encoders import (
    ClipEncoder,
    TinyClipEncoder,
    TinyWhisperEncoder,
    Wav2Vec2Encoder,
    WhisperEncoder,
)
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import find_weights

LOOK_UP = """
import json, time, tvr_lightning
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import find_weights
source = find_weights("ViT-B-32", "openai")
found = [str(source.path), source.quick_gelu, source.mean[0]]
start = time.monotonic()
try:
    find_weights("ViT-L-14", "openai")
except MissingWeightsError as error:
    print(json.dumps([found, str(error), time.monotonic() - start]))
"""


def test_tags_come_from_the_cache_or_are_missed_within_seconds(tmp_path):
    snapshot = tmp_path / "hub/models--timm--vit_base_patch32_clip_224.openai/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "open_clip_model.safetensors").write_bytes(b"stands for the weights")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("abc")
    nowhere = "http://127.0.0.1:9"  # the discard port: a proxy that refuses, so that no network is asked
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {"https_proxy": nowhere, "HTTPS_PROXY": nowhere, "no_proxy": "", "NO_PROXY": ""}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", LOOK_UP], env=environment, capture_output=True, text=True, check=True)
    found, message, seconds = json.loads(done.stdout)
    assert found == [str(snapshot / "open_clip_model.safetensors"), True, pytest.approx(0.48145466)]
    for part in ("'openai' for ViT-L-14", str(tmp_path / "hub"), str(tmp_path / ".cache/clip/ViT-L-14.pt")):
        assert part in message
    for part in ("huggingface.co", "openaipublic", "Expected layout", "recipes/fixture.yaml"):
        assert part in message
    assert seconds < 30


def test_a_quickgelu_name_refuses_weights_trained_with_gelu():
    with pytest.raises(ValueError, match=r"QuickGELU mismatch.*use the architecture ViT-B-32$"):
        find_weights("ViT-B-32-quickgelu", "laion2b_s34b_b79k")


def test_a_missing_file_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(MissingWeightsError, match=str(tmp_path / "ViT-B-32.pt")):
        find_weights("ViT-B-32", str(tmp_path / "ViT-B-32.pt"))


def test_an_unknown_tag_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"no open_clip tag of ViT-B-32.*laion2b_s34b_b79k.*openai"):
        find_weights("ViT-B-32", "openia")


def test_an_unknown_architecture_names_close_ones():
    with pytest.raises(ValueError, match=r"'ViT-B32' is unknown.*ViT-B-32"):
        find_weights("ViT-B32", None)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("coca_ViT-B-32", "captioning model"),
        ("roberta-ViT-B-32", "roberta-base"),
        ("tvr-test-foreign-tokenizer", "bert-base-uncased"),
    ],
)
def test_architectures_without_a_clip_text_tower_are_named(architecture, reason):
    with pytest.raises(ValueError, match=f"architecture {architecture} .*{reason}"):
        find_weights(architecture, None)


@pytest.mark.parametrize("weights", [None, "none"])
def test_no_weights_is_a_source_without_a_path(weights):
    assert find_weights("ViT-B-32", weights).path is None


def test_pixel_statistics_follow_the_architecture(tmp_path: Path):
    assert find_weights("PE-Core-B-16", None).mean == (0.5, 0.5, 0.5)
    assert find_weights("ViT-B-32", None).mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))


def test_encoders_say_which_files_they_will_read(tmp_path, monkeypatch):
    weights = tmp_path / "some.pt"
    with pytest.raises(MissingWeightsError, match=r"some\.pt"):
        WhisperEncoder.required_files(weights=str(weights))
    weights.touch()
    assert ClipEncoder.required_files(weights=str(weights), freeze="all") == [weights]
    assert WhisperEncoder.required_files(size="small", weights=str(weights)) == [weights]
    assert TinyClipEncoder.required_files(trained_in=str(weights)) == [weights]
    (tmp_path / "config.json").touch()
    assert Wav2Vec2Encoder.required_files(weights=str(tmp_path)) == [tmp_path / "config.json"]
    for kind in (ClipEncoder, WhisperEncoder, Wav2Vec2Encoder):
        assert kind.required_files(weights=None) == []
    assert TinyWhisperEncoder.required_files(width=64) == TinyClipEncoder.required_files() == []


def test_no_encoder_is_known_by_name_where_recipes_are_read():
    text = Path(tvr_lightning.recipe.__file__).read_text(encoding="utf-8")
    assert not re.search(r"Clip|Whisper|Wav2Vec", text)
