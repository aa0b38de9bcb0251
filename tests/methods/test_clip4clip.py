"""CLIP4Clip's headers and cross encoder, and the features that an evaluation keeps."""

import torch
from methods.parts import build, features, paired

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.layers.temporal import MeanP
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.clip4clip import TightTransf, cross_encoder


def method(header):
    return build(CLIP4Clip, {"similarity_header": header}, torch.float32)


def test_the_tight_header_has_no_temperature():
    model = method(TightTransf(2)).eval()
    assert not model.temperature.logit_scale.requires_grad
    pairs = paired(*features(3, 3))
    similarity, loss = model.score(pairs.text, pairs.video).similarity, model.losses(pairs)["info_nce"]
    assert torch.equal(model.logits(similarity), similarity)
    model.temperature.logit_scale.data.fill_(1.0)
    assert torch.equal(model.losses(pairs)["info_nce"], loss)
    cosines = method(MeanP())
    assert cosines.temperature.logit_scale.requires_grad
    assert torch.equal(cosines.logits(similarity), cosines.temperature() * similarity)


def test_the_cross_encoder_starts_from_the_text_transformer():
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, text_layers=3, vision_layers=1, context_length=10)
    cross = cross_encoder(encoder, layers=2, frames=12)
    assert cross.position_embeddings.num_embeddings == 13
    assert cross.dropout.p == 0.1
    assert torch.equal(cross.position_embeddings.weight[:10], encoder.clip.positional_embedding)
    for mine, theirs in zip(cross.resblocks, encoder.clip.transformer.resblocks, strict=False):
        assert torch.equal(mine.attn.in_proj_weight, theirs.attn.in_proj_weight)
        assert torch.equal(mine.mlp.c_proj.bias, theirs.mlp.c_proj.bias)
