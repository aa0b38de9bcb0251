"""Encoders with merged changes compute in open_clip what they computed in the method."""

import errno
import re
from pathlib import Path

import open_clip
import pytest
import torch
from search_parts import save_checkpoint

import tvr_lightning
from tvr_lightning.encoders import Adapter, LoRA, TinyClipEncoder
from tvr_lightning.encoders.clip import build_model
from tvr_lightning.errors import UserError
from tvr_lightning.methods import CLIP4Clip

SMALL = {"width": 64, "text_layers": 2, "vision_layers": 2, "image_size": 32}
CONFIGURATION = {
    "embed_dim": 64,
    "vision_cfg": {"width": 64, "layers": 2, "patch_size": 16, "image_size": 32},
    "text_cfg": {"width": 64, "layers": 2, "heads": 1, "context_length": 77},
}


def saved(tuning, path):
    torch.manual_seed(1)
    module = CLIP4Clip(TinyClipEncoder(**SMALL), frames=2, words=12, tuning=tuning)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2)
    module.temperature.logit_scale.data.fill_(3.0)
    options = {"class_path": f"tvr_lightning.encoders.{type(tuning).__name__}", "init_args": vars(tuning)}
    return save_checkpoint(module, SMALL, {"frames": 2, "words": 12, "tuning": options}, path)


def test_open_clip_computes_the_features_of_a_merged_encoder(tmp_path):
    checkpoint = saved(LoRA(targets=["query", "key", "output", "mlp"]), tmp_path / "last.ckpt")
    tvr_lightning.merge(checkpoint, tmp_path / "merged.pt")
    merged = build_model(CONFIGURATION, "float32").eval()
    open_clip.load_checkpoint(merged, str(tmp_path / "merged.pt"))
    encoder = tvr_lightning.load(checkpoint).module.encoder
    pixels, ids = torch.randn(3, 3, 32, 32), encoder.tokenizer.encode(["a red star", "a dog"], 77).ids
    with torch.no_grad():
        frames = encoder.encode_pixels(pixels[None], torch.ones(1, 3, dtype=torch.bool)).frames[0]
        torch.testing.assert_close(merged.encode_image(pixels), frames)
        torch.testing.assert_close(merged.encode_text(ids), encoder.encode_tokens(ids).sentence)
    assert merged.logit_scale.item() == 3.0


def test_an_encoder_with_adapters_cannot_be_merged(tmp_path):
    checkpoint = saved(Adapter(), tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt: open_clip has no model with adapters"):
        tvr_lightning.merge(checkpoint, tmp_path / "merged.pt")
    assert not (tmp_path / "merged.pt").exists()


@pytest.mark.parametrize("out", ["last.ckpt", "link.pt", "../merged/last.ckpt", "hard.pt"])
def test_the_checkpoint_is_never_overwritten(out, tmp_path, monkeypatch):
    (tmp_path / "merged").mkdir()
    checkpoint = saved(LoRA(), tmp_path / "merged" / "last.ckpt")
    before = checkpoint.read_bytes()
    monkeypatch.chdir(tmp_path / "merged")
    Path("link.pt").symlink_to("last.ckpt")
    Path("hard.pt").hardlink_to("last.ckpt")
    with pytest.raises(UserError, match=rf"{re.escape(out)} is the file .*last\.ckpt, which is read"):
        tvr_lightning.merge(checkpoint, out)
    assert checkpoint.read_bytes() == before


def test_a_merge_that_fails_keeps_the_previous_file(tmp_path, monkeypatch):
    checkpoint, out = saved(LoRA(), tmp_path / "last.ckpt"), tmp_path / "merged.pt"
    out.write_bytes(b"previous")

    def full(content, file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"merged\.pt could not be written .*The previous file is intact"):
        tvr_lightning.merge(checkpoint, out)
    assert out.read_bytes() == b"previous"
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "merged.pt"}
