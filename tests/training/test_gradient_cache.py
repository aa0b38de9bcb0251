"""Encoding in chunks has the gradient of the whole batch, and the activations of one chunk."""

from dataclasses import dataclass

import pytest
import torch
from scale_models import build, pairs
from torch import Tensor

from tvr_lightning.features import FeatureBatch
from tvr_lightning.training.gradient_cache import encode_in_chunks
from tvr_lightning.training.optim import OptimizerConfig


@dataclass
class Items(FeatureBatch):
    values: Tensor


@pytest.mark.parametrize("name", ["CLIP4Clip", "DPDV"])
def test_chunks_have_the_gradient_of_the_whole_batch(name):
    method, gradients = build(name), []
    method.log = method.log_dict = lambda *args, **kwargs: None
    for chunk in (None, 3):
        method.optimizer_config = OptimizerConfig(gradient_cache=chunk)
        method.zero_grad()
        torch.manual_seed(1)
        method.training_step(pairs(method), 0).backward()
        gradients.append({name: p.grad for name, p in method.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_dropout_is_the_same_in_both_encodings():
    weight = torch.ones(6, requires_grad=True)
    items = Items(torch.arange(24.0).view(4, 6) + 1)

    def encode(batch):
        return Items(torch.nn.functional.dropout(batch.values * weight, 0.5))

    torch.manual_seed(0)
    encoded = encode_in_chunks(encode, items, 3)
    encoded.values.sum().backward()
    torch.testing.assert_close(weight.grad, encoded.values.detach().sum(0))


def test_only_one_chunk_is_encoded_at_a_time():
    weight = torch.ones(6, requires_grad=True)
    sizes = []

    def encode(batch):
        sizes.append(len(batch))
        return Items((batch.values * weight).exp())

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        encoded = encode_in_chunks(encode, Items(torch.zeros(7, 6)), 3)
    assert sum(kept) == 0
    encoded.values.sum().backward()
    assert sorted(sizes) == [1, 1, 3, 3, 3, 3]
