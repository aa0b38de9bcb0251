"""Interactions of tokens, pair by pair; the recorded cases of DPDV have their definitions."""

import pytest
import torch

from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.dpdv.interactions import MeanInteraction, SimilarityAggregation, WeightedMax

N, M, W, T, D = 5, 4, 6, 7, 16


def sides():
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(N, W, D, generator=generator)
    tokens = torch.randn(M, T, D, generator=generator)
    word_mask = torch.arange(W) < torch.tensor([6, 2, 4, 1, 3])[:, None]
    token_mask, pair_mask = (torch.rand(*shape, generator=generator) < 0.6 for shape in ((M, T), (N, M, T)))
    token_mask[:, 0] = pair_mask[:, :, 0] = True
    return words, word_mask, tokens, token_mask, pair_mask


MADE = {
    "mean": MeanInteraction,
    "ucofia": lambda: SimilarityAggregation(W, T, temperature=10.0),
    "weighted-max": lambda: WeightedMax(D),
}


def interaction(name):
    torch.manual_seed(1)
    module = MADE[name]()
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return module


def score(module, words, word_mask, tokens, token_mask, pair_mask=None):
    return module(module.prepared("text", words, word_mask), module.prepared("video", tokens, token_mask), pair_mask)


@pytest.mark.parametrize("name", MADE)
def test_a_score_depends_only_on_the_tokens_that_its_pair_uses(name):
    module = interaction(name)
    words, word_mask, tokens, token_mask, pair_mask = sides()
    found = score(module, words, word_mask, tokens, token_mask, pair_mask)
    assert not torch.allclose(score(module, words, word_mask, tokens, token_mask), found)
    words = words.masked_fill(~word_mask.unsqueeze(-1), 9.0)
    for i in range(N):
        for j in range(M):
            used = token_mask[j : j + 1] & pair_mask[i, j]
            own = tokens[j : j + 1].masked_fill(~used.unsqueeze(-1), -9.0)
            alone = score(module, words[i : i + 1], word_mask[i : i + 1], own, used)
            torch.testing.assert_close(found[i : i + 1, j : j + 1], alone, rtol=1e-5, atol=1e-6)


def test_an_aggregation_has_fixed_numbers_of_tokens():
    words, word_mask, tokens, token_mask, _ = sides()
    with pytest.raises(ValueError, match="built for 6 tokens per text and 7 per video, but got 6 and 6"):
        score(interaction("ucofia"), words, word_mask, tokens[:, 1:], token_mask[:, 1:])


def test_aggregation_with_identities_and_one_word_is_a_double_softmax():
    module = SimilarityAggregation(1, T, temperature=10.0)
    tokens, sentence = sides()[2], torch.randn(N, 1, D)
    cosine = torch.einsum("nd,mtd->nmt", unit(sentence[:, 0]), unit(tokens))
    expected = ((10 * (10 * cosine).softmax(-1)).softmax(-1) * cosine).sum(-1)
    ones = torch.ones(N, 1, dtype=torch.bool), torch.ones(M, T, dtype=torch.bool)
    torch.testing.assert_close(score(module, sentence, ones[0], tokens, ones[1]), expected)


@pytest.mark.parametrize("name", MADE)
def test_items_without_tokens_score_zero_with_finite_gradients(name):
    module = interaction(name)
    words, word_mask, tokens, token_mask, pair_mask = sides()
    word_mask[1] = False
    token_mask[2] = False
    words.requires_grad_()
    for chosen in (None, pair_mask):
        found = score(module, words, word_mask, tokens, token_mask, chosen)
        assert bool((found[1] == 0).all())
        assert bool((found[:, 2] == 0).all())
        found.sum().backward()
        assert bool(words.grad.isfinite().all())
