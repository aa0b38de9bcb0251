"""Checkpoints with transformers' CLIP inside, as X-Pool, T-MASS and GAID save them."""

import pytest
import torch
from encoders.openai_state import openai_encoder
from transformers import CLIPConfig, CLIPModel

from tvr_lightning.authors.importer import import_checkpoint
from tvr_lightning.authors.names import with_openai_names
from tvr_lightning.encoders import TinyWhisperEncoder
from tvr_lightning.errors import UserError

D, F = 64, 5
BLOCK = [
    *(f"cross_attn.{name}_proj.{kind}" for name in ("q", "k", "v", "out") for kind in ("weight", "bias")),
    *(f"layer_norm{number}.{kind}" for number in (1, 2, 3) for kind in ("weight", "bias")),
    "linear_proj.weight", "linear_proj.bias",
]  # fmt: skip


@pytest.fixture(scope="module")
def clip():
    torch.manual_seed(0)
    shape = {"hidden_size": D, "intermediate_size": 4 * D, "num_attention_heads": 1, "num_hidden_layers": 2}
    text = {**shape, "vocab_size": 50, "max_position_embeddings": 11, "eos_token_id": 49, "bos_token_id": 48}
    vision = {**shape, "image_size": 8, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=D)).eval()


def checkpoint(clip, method):
    tensors = {f"clip.{name}": tensor for name, tensor in clip.state_dict().items()}
    tensors["clip.text_model.embeddings.position_ids"] = torch.arange(11)[None]  # older transformers saved it
    for name in BLOCK:
        shape = (D, D) if name.endswith("weight") and "norm" not in name else (D,)
        tensors[f"pool_frames.{name}"] = torch.randn(shape)
    if method != "xpool":
        tensors["stochastic.std_branch.linear_proj.weight"] = torch.randn(D, F)
        tensors["stochastic.std_branch.linear_proj.bias"] = torch.randn(D)
        tensors["stochastic.std_branch.learnable_scalar"] = torch.full((1,), torch.nan)  # never initialised
    if method == "gaid":
        tensors |= {"gate_fc.weight": torch.randn(1, 3 * D), "gate_fc.bias": torch.randn(1)}
        tensors["stochastic.alpha"] = torch.tensor(0.4)
    return tensors


@torch.no_grad()
def test_the_renamed_clip_gives_transformers_features(clip):
    renamed = with_openai_names(checkpoint(clip, "xpool"), "file")
    state = {name.removeprefix("clip."): tensor for name, tensor in renamed.items() if name.startswith("clip.")}
    encoder = openai_encoder(state)
    ids = torch.tensor([[48, 3, 7, 49, 0, 0], [48, 5, 1, 2, 9, 49]])
    pixels = torch.randn(2, 3, 3, 8, 8)
    padded = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    text = clip.text_projection(clip.text_model(input_ids=ids, attention_mask=padded).pooler_output)
    frames = clip.visual_projection(clip.vision_model(pixel_values=pixels.flatten(0, 1)).pooler_output)
    made = encoder.encode_tokens(ids, padded.bool()).sentence
    torch.testing.assert_close(made, text, rtol=1e-4, atol=1e-5)
    made = encoder.encode_pixels(pixels, torch.ones(2, 3, dtype=torch.bool)).frames
    torch.testing.assert_close(made.flatten(0, 1), frames, rtol=1e-4, atol=1e-5)
    assert with_openai_names(renamed, "file") == renamed


def test_importers_take_the_authors_checkpoints(clip):
    tensors = checkpoint(clip, "xpool")
    xpool = import_checkpoint(tensors, "file", words=7, frames=F)
    weight = xpool.head.attention.linear_proj.weight
    assert torch.equal(weight, tensors["pool_frames.linear_proj.weight"])
    tensors = checkpoint(clip, "tmass")
    tmass = import_checkpoint(tensors, "file", words=7, frames=F)
    assert torch.equal(tmass.head.radius.linear_proj.bias, tensors["stochastic.std_branch.linear_proj.bias"])
    tensors = checkpoint(clip, "gaid")
    gaid = import_checkpoint(tensors, "file", words=7, frames=F, audio_encoder=TinyWhisperEncoder(width=D))
    assert torch.equal(gaid.head.gate.linear.weight, tensors["gate_fc.weight"])
    assert gaid.head.alpha.item() == pytest.approx(0.4)
    tensors |= {"linear.weight": torch.randn(D, 32), "linear.bias": torch.randn(D)}
    gaid = import_checkpoint(tensors, "file", words=7, frames=F, audio_encoder=TinyWhisperEncoder(width=32))
    assert torch.equal(gaid.audio_projection.weight, tensors["linear.weight"])


def test_what_does_not_fit_is_named(clip):
    tensors = checkpoint(clip, "tmass")
    with pytest.raises(UserError, match="for 5 frames, not for 12 frames"):
        import_checkpoint(tensors, "file", words=7, frames=12)
    with pytest.raises(UserError, match="positions for 11 words"):
        import_checkpoint(tensors, "file", words=12, frames=F)
    with pytest.raises(UserError, match="is a checkpoint of T-MASS, not of X-Pool"):
        import_checkpoint(tensors, "file", words=7, frames=F, method="xpool")
    with pytest.raises(UserError, match=r"2 missing: linear\.bias \(64,\), linear\.weight"):
        import_checkpoint(
            checkpoint(clip, "gaid"), "file", words=7, frames=F, audio_encoder=TinyWhisperEncoder(width=32, heads=2)
        )
    odd = checkpoint(clip, "gaid") | {"linear.weight": torch.randn(D, 50), "linear.bias": torch.randn(D)}
    with pytest.raises(UserError, match="width is 50; expected a multiple of 4"):
        import_checkpoint(odd, "file", words=7, frames=F)
    del tensors["clip.text_model.encoder.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(UserError, match=r"in_proj_weight is missing self_attn\.k_proj"):
        with_openai_names(tensors, "file")
    extra = checkpoint(clip, "tmass") | {"clip.text_model.extra": torch.zeros(1)}
    with pytest.raises(UserError, match=r"1 unexpected: clip\.text_model\.extra"):
        import_checkpoint(extra, "file", words=7, frames=F)
