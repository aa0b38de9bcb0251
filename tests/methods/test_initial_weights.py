"""New layers start as in the released codes, which no recorded case shows: it begins with weights of its own."""

import pytest
import torch
from torch import nn

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.layers.patch_selector import PatchScores
from tvr_lightning.layers.temporal import TemporalTransformer
from tvr_lightning.methods.clip4clip import CrossEncoder, cross_encoder
from tvr_lightning.methods.dpdv.model import DPDVHead
from tvr_lightning.methods.dpdv.options import DPDVOptions
from tvr_lightning.methods.drl import token_weights
from tvr_lightning.methods.gare.model import IncrementNetwork
from tvr_lightning.pairwise import TextConditionedAttention

D = 128
BLOCKS = "resblocks"  # start from those of CLIP


@pytest.mark.parametrize(
    ("module", "deviation"),
    [
        (CrossEncoder(D, layers=1), 0.02),
        (IncrementNetwork(D), 0.02),
        (token_weights(D, 3), 0.02),
        (DPDVHead(D, 8, 4, DPDVOptions()), 0.02),
        (PatchScores(D), 0.02),
        (TemporalTransformer(D, layers=1), 0.01),
        (TextConditionedAttention(D, initialization="normal"), 0.02),
    ],
    ids=lambda value: type(value).__name__,
)
def test_new_layers_have_the_released_deviation_and_no_bias(module, deviation):
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.Embedding) and BLOCKS not in name
    }
    assert layers
    for layer in layers.values():
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.3)
        assert getattr(layer, "bias", None) is None or not layer.bias.any()


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
