"""The command `tvr convert`: its output, the converted checkpoint, and errors."""

import re

import pytest
import torch
from authors.stand_ins import CASES, stand_in, with_agent
from parity.case import load_case

import tvr_lightning
from tvr_lightning.authors.convert import clip_configuration, convert, encoder_section
from tvr_lightning.authors.families import FAMILIES
from tvr_lightning.cli import main
from tvr_lightning.encoders import MissingWeightsError, WhisperEncoder
from tvr_lightning.encoders.clip import build_model
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.encoders.wav2vec2 import SIZES as WAV2VEC2_SIZES
from tvr_lightning.encoders.wav2vec2 import Wav2Vec2Encoder
from tvr_lightning.encoders.whisper import SIZES
from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.released import RELEASED
from tvr_lightning.training.checkpoints import CheckpointError


@pytest.fixture
def converted(tmp_path):
    """Convert tensors; return the module and the text."""

    def run(tensors, **options):
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        module, lines = convert(tmp_path / "pytorch_model.bin", tmp_path / "out.ckpt", **options)
        return module, "\n".join(lines)

    return run


def checkpoint(name):
    return load_case(CASES / f"{name}.safetensors").checkpoint


def test_the_output_shows_method_sizes_and_next_command(converted, tmp_path):
    _, output = converted(checkpoint("tcmgc"), words=12, frames=6)
    shown = ("TCMGC", "keep_rate: 0.3", "frames: 6", f"tvr test --ckpt_path {tmp_path / 'out.ckpt'}")
    assert all(text in output for text in shown)
    assert "softmax_lambda" not in output  # a default
    assert "float16" not in output


@pytest.mark.parametrize("source", ["model.bin", "clip.pt"])
def test_a_conversion_never_overwrites_what_it_reads(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("model.bin", "clip.pt"):
        torch.save(checkpoint("clip4clip_meanP"), name)
    before = (tmp_path / source).read_bytes()
    (tmp_path / "out.ckpt").symlink_to(source)
    assert main(["convert", "model.bin", "out.ckpt", "--openai_clip=clip.pt"]) == 2
    assert f"out.ckpt is the file {source}, which is read" in capsys.readouterr().err
    assert (tmp_path / source).read_bytes() == before


def test_half_precision_is_converted_to_float32(converted, tmp_path):
    tensors = checkpoint("clip4clip_meanP")
    half = tensors["clip.visual.proj"].half()
    assert "1 float16 tensors are now float32" in converted(tensors | {"clip.visual.proj": half})[1]
    state = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(state["encoder.clip.visual.proj"], half.float())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_every_importer_has_a_published_result_to_verify():
    assert {family.name for family in FAMILIES} == RELEASED.keys()


def test_known_architectures_are_named_and_other_sizes_are_written_out():
    switches = {"text_mask": False, "patch_shift": False}
    vision = {"width": 64, "layers": 1, "patch_size": 16, "image_size": 32, "head_width": 64}
    text = {"width": 64, "layers": 1, "context_length": 40, "vocab_size": 128, "heads": 1}
    configuration = {"embed_dim": 64, "quick_gelu": True, "vision_cfg": vision, "text_cfg": text}
    assert encoder_section(clip_configuration(checkpoint("clip4clip_meanP")), switches) == {
        "class_path": "SizedClipEncoder",
        "init_args": {"configuration": configuration, **switches},
    }
    for architecture in ("ViT-B-32", "ViT-B-16", "ViT-L-14"):
        with torch.device("meta"):
            model = build_model(model_configuration(architecture), "float32")
        named = {f"clip.{name}": tensor for name, tensor in model.state_dict().items()}
        assert encoder_section(clip_configuration(named), switches) == {
            "class_path": "ClipEncoder",
            "init_args": {"architecture": architecture, "weights": "openai", **switches},
        }


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tcmgc", {"method": "clip"}, r"The method 'clip' is not supported. Available: .*clip4clip.* tcmgc"),
        ("tcmgc", {"openai_clip": CASES / "tcmgc.safetensors"}, "--openai_clip is only for UCoFiA"),
        (None, {}, r"no known method has these tensors: further\.weight"),
    ],
)
def test_bad_checkpoints_are_refused_without_output(converted, tmp_path, name, options, message):
    with pytest.raises(UserError, match=message):
        converted(checkpoint(name) if name else {"further.weight": torch.ones(1)}, **options)
    assert not (tmp_path / "out.ckpt").exists()


def test_both_copies_of_psi_of_gare_must_be_equal(converted):
    saved = with_agent(checkpoint("gare"))
    for name in ("agent.psi.mean_proj.bias", "agent.psi.log_std_proj.weight"):  # read, and never used
        with pytest.raises(UserError, match=rf"differ from those without 'agent\.'.*: {name}$"):
            converted(saved | {name: saved[name] + 1e-3})


def save_whisper(folder):
    """Save random weights of Whisper base where openai-whisper keeps its own."""
    encoder = WhisperEncoder("base", weights=None)
    width, heads, layers = SIZES["base"]
    dimensions = {"n_audio_state": width, "n_audio_head": heads, "n_audio_layer": layers, "n_audio_ctx": 1500}
    state = {f"encoder.{name}": tensor for name, tensor in encoder.encoder.state_dict().items()}
    (folder / "whisper").mkdir()
    torch.save({"dims": dimensions | {"n_mels": 80}, "model_state_dict": state}, folder / "whisper" / "base.pt")
    return encoder


def save_wav2vec2(folder):
    """Save random weights of wav2vec 2.0 base where transformers keeps its own."""
    cached = folder / "hub" / "models--facebook--wav2vec2-base"
    encoder = Wav2Vec2Encoder("base", weights=None)
    encoder.model.save_pretrained(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    return encoder


@pytest.mark.parametrize(
    ("save", "width", "error", "missing", "audio"),
    [
        (save_whisper, 512, MissingWeightsError, r"Whisper base .* has no weights", ("whisper", 30)),
        (save_wav2vec2, 768, CheckpointError, r"wav2vec2 base .* has no weights", ("wav2vec2", 60)),  # the whole track
    ],
)
def test_gaid_loads_its_audio_encoder_from_the_hub(save, width, error, missing, audio, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(WAV2VEC2_SIZES, "base", (768, 2, 1))  # one layer instead of twelve
    tensors = stand_in("gaid") | {"linear.weight": torch.randn(64, width), "linear.bias": torch.randn(64)}
    torch.save(tensors, tmp_path / "gaid.pth")
    assert main(["convert", str(tmp_path / "gaid.pth"), str(tmp_path / "out.ckpt")]) == 0
    assert re.search(missing, capsys.readouterr().out)
    written = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert not any(name.startswith("audio_encoder.") for name in written["state_dict"])
    data = written["datamodule_hyper_parameters"]
    assert (data["audio"], data["audio_alignment"], data["audio_seconds"]) == (audio[0], "clip30", audio[1])
    with pytest.raises(error, match=missing):
        tvr_lightning.load(tmp_path / "out.ckpt")
    encoder = save(tmp_path)
    loaded = tvr_lightning.load(tmp_path / "out.ckpt").module
    assert torch.equal(loaded.audio_projection.weight, tensors["linear.weight"])
    assert all(map(torch.equal, loaded.audio_encoder.state_dict().values(), encoder.state_dict().values()))
