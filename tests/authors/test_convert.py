"""`tvr convert`: what it reads from a checkpoint, what it writes, and what it refuses."""

import pytest
import torch
from authors.stand_ins import stand_in, with_agent
from parity.case import load_case
from safetensors.torch import load_file

import tvr_lightning
from tvr_lightning.authors.convert import convert, encoder_section
from tvr_lightning.authors.families import FAMILIES
from tvr_lightning.authors.importer import clip_configuration
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


def authors_file(parity_cases, name, tmp_path):
    case = load_case(parity_cases / f"{name}.safetensors")
    torch.save(case.checkpoint, tmp_path / "pytorch_model.bin")
    return case, tmp_path / "pytorch_model.bin"


def test_the_conversion_shows_what_it_found(parity_cases, tmp_path, capsys):
    _, source = authors_file(parity_cases, "tcmgc", tmp_path)
    output = "\n".join(convert(source, tmp_path / "out.ckpt", words=12, frames=6)[1])
    assert "TCMGC" in output
    assert "keep_rate: 0.3" in output
    assert "frames: 6" in output
    assert "softmax_lambda" not in output  # a default
    assert f"tvr test --ckpt_path {tmp_path / 'out.ckpt'}" in output
    assert "float16" not in output


def test_half_precision_becomes_float32(parity_cases, tmp_path, capsys):
    case, source = authors_file(parity_cases, "clip4clip_meanP", tmp_path)
    projection = case.checkpoint["clip.visual.proj"].half()
    torch.save(case.checkpoint | {"clip.visual.proj": projection}, source)
    assert "1 float16 tensors are now float32" in "\n".join(convert(source, tmp_path / "out.ckpt")[1])
    found = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]["encoder.clip.visual.proj"]
    assert torch.equal(found, projection.float())


def test_the_tables_to_verify_name_every_importer():
    assert {family.name for family in FAMILIES} == RELEASED.keys()


def test_other_sizes_are_written_out_and_known_architectures_are_named(parity_cases):
    checkpoint = load_case(parity_cases / "clip4clip_meanP.safetensors").checkpoint
    switches = {"text_mask": False, "patch_shift": False}
    assert encoder_section(clip_configuration(checkpoint), switches) == {
        "class_path": "SizedClipEncoder",
        "init_args": {
            "configuration": {
                "embed_dim": 64,
                "quick_gelu": True,
                "vision_cfg": {"width": 64, "layers": 1, "patch_size": 16, "image_size": 32, "head_width": 64},
                "text_cfg": {"width": 64, "layers": 1, "context_length": 40, "vocab_size": 128, "heads": 1},
            },
            **switches,
        },
    }
    for architecture in ("ViT-B-32", "ViT-B-16", "ViT-L-14"):
        with torch.device("meta"):
            model = build_model(model_configuration(architecture), "float32")
        named = {f"clip.{name}": tensor for name, tensor in model.state_dict().items()}
        assert encoder_section(clip_configuration(named), switches) == {
            "class_path": "ClipEncoder",
            "init_args": {"architecture": architecture, "weights": "openai", **switches},
        }


def test_bad_sources_write_nothing(parity_cases, tmp_path):
    case, source = authors_file(parity_cases, "tcmgc", tmp_path)
    out = tmp_path / "out.ckpt"
    with pytest.raises(UserError, match="is a checkpoint of TC-MGC"):
        convert(source, out, method="clip4clip")
    with pytest.raises(UserError, match=r"The method 'clip' is not supported. Available: .*clip4clip.* tcmgc"):
        convert(source, out, method="clip")
    with pytest.raises(UserError, match="--openai_clip is only for UCoFiA"):
        convert(source, out, openai_clip=source)
    torch.save(case.checkpoint | {"further.weight": torch.ones(1)}, source)
    with pytest.raises(UserError, match=r"1 unexpected: further\.weight"):
        convert(source, out)
    torch.save({"further.weight": torch.ones(1)}, source)
    with pytest.raises(UserError, match=r"no known method has these tensors: further\.weight"):
        convert(source, out)
    assert not out.exists()


def test_the_authors_checkpoint_itself_is_untouched(parity_cases, tmp_path):
    case, source = authors_file(parity_cases, "clip4clip_meanP", tmp_path)
    before = source.read_bytes()
    convert(source, tmp_path / "out.ckpt", words=12, frames=6)
    assert source.read_bytes() == before
    stored = load_file(case.path)
    assert torch.equal(stored["checkpoint.clip.visual.proj"], case.checkpoint["clip.visual.proj"])


def test_psi_of_gare_is_read_once_and_must_be_one(parity_cases, tmp_path):
    case, source = authors_file(parity_cases, "gare", tmp_path)
    saved = with_agent(case.checkpoint)
    torch.save(saved, source)
    made = convert(source, tmp_path / "out.ckpt")[0].state_dict()
    torch.save(case.checkpoint, source)
    plain = convert(source, tmp_path / "plain.ckpt")[0].state_dict()
    assert made.keys() == plain.keys()
    assert all(torch.equal(made[name], plain[name]) for name in plain)
    for name in ("agent.psi.mean_proj.bias", "agent.psi.log_std_proj.weight"):  # read, and never used
        torch.save(saved | {name: saved[name] + 1e-3}, source)
        with pytest.raises(UserError, match=rf"differ from those without 'agent\.'.*: {name}$"):
            convert(source, tmp_path / "other.ckpt")


def whisper_file(folder):
    """Random weights of Whisper base where openai-whisper keeps its own."""
    torch.manual_seed(1)
    encoder = WhisperEncoder("base", weights=None)
    width, heads, layers = SIZES["base"]
    dimensions = {"n_audio_state": width, "n_audio_head": heads, "n_audio_layer": layers, "n_audio_ctx": 1500}
    state = {f"encoder.{name}": tensor for name, tensor in encoder.encoder.state_dict().items()}
    (folder / "whisper").mkdir()
    torch.save({"dims": dimensions | {"n_mels": 80}, "model_state_dict": state}, folder / "whisper" / "base.pt")
    return encoder


def test_gaid_takes_the_audio_encoder_from_its_own_source(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checkpoint = stand_in("gaid")
    checkpoint |= {"linear.weight": torch.randn(64, 512), "linear.bias": torch.randn(64)}
    torch.save(checkpoint, tmp_path / "gaid.pth")
    assert main(["convert", str(tmp_path / "gaid.pth"), str(tmp_path / "out.ckpt")]) == 0
    assert "WhisperEncoder loads its own weights" in capsys.readouterr().out
    state = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]
    assert not any(name.startswith("audio_encoder.") for name in state)
    with pytest.raises(MissingWeightsError, match=r"Whisper base .* has no weights"):
        tvr_lightning.load(tmp_path / "out.ckpt")
    encoder = whisper_file(tmp_path)
    loaded = tvr_lightning.load(tmp_path / "out.ckpt").module.audio_encoder.encoder
    assert torch.equal(loaded.conv1.weight, encoder.encoder.conv1.weight)
    assert torch.equal(loaded.blocks[5].mlp[2].weight, encoder.encoder.blocks[5].mlp[2].weight)


def test_gaid_with_wav2vec2_features_is_tested_with_wav2vec2_on_the_whole_track(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(WAV2VEC2_SIZES, "base", (768, 2, 1))  # one layer in place of twelve
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--facebook--wav2vec2-base"
    checkpoint = stand_in("gaid") | {"linear.weight": torch.randn(64, 768), "linear.bias": torch.randn(64)}
    torch.save(checkpoint, tmp_path / "gaid.pth")
    assert main(["convert", str(tmp_path / "gaid.pth"), str(tmp_path / "out.ckpt")]) == 0
    assert "Wav2Vec2Encoder loads its own weights" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"wav2vec2 base .* has no weights"):
        tvr_lightning.load(tmp_path / "out.ckpt")
    encoder = Wav2Vec2Encoder("base", weights=None)
    encoder.model.save_pretrained(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    loaded = tvr_lightning.load(tmp_path / "out.ckpt").module
    assert torch.equal(loaded.audio_projection.weight, checkpoint["linear.weight"])
    assert all(map(torch.equal, loaded.audio_encoder.state_dict().values(), encoder.state_dict().values()))
    data = torch.load(tmp_path / "out.ckpt", weights_only=True)["datamodule_hyper_parameters"]
    assert (data["audio"], data["audio_alignment"], data["audio_seconds"]) == ("wav2vec2", "clip30", 60)
