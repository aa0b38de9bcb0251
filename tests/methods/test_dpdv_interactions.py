"""Interactions of tokens against their definitions, pair by pair."""

import pytest
import torch

from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.dpdv.interactions import (
    MeanInteraction,
    SimilarityAggregation,
    WeightedMax,
    WeightedTokens,
    compacted,
    masked_softmax,
)

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


def score_of_one_pair(name, module, words, tokens):
    """Score of one pair from its real tokens, (w, D) and (t, D)."""
    if name == "mean":
        return unit(words.mean(0)) @ unit(tokens.mean(0))
    cosine = unit(words) @ unit(tokens).T
    word = module.text_weights.layers(words).squeeze(-1).softmax(0)
    token = module.video_weights.layers(tokens).squeeze(-1).softmax(0)
    return (word @ cosine.amax(1) + token @ cosine.amax(0)) / 2


@pytest.mark.parametrize("pairwise", [False, True])
@pytest.mark.parametrize("name", ["mean", "weighted-max"])
def test_scores_match_the_definition_pair_by_pair(name, pairwise):
    module = interaction(name)
    words, word_mask, tokens, token_mask, pair_mask = sides()
    pair_mask = pair_mask if pairwise else torch.ones_like(pair_mask)
    found = score(module, words, word_mask, tokens, token_mask, pair_mask if pairwise else None)
    for i in range(N):
        for j in range(M):
            there = token_mask[j] & pair_mask[i, j]
            expected = score_of_one_pair(name, module, words[i, word_mask[i]], tokens[j, there])
            torch.testing.assert_close(found[i, j], expected, rtol=1e-5, atol=1e-6)


def test_aggregation_ignores_padding_and_tokens_that_a_pair_leaves_out():
    module = interaction("ucofia")
    words, word_mask, tokens, token_mask, pair_mask = sides()
    found = score(module, words, word_mask, tokens, token_mask, pair_mask)
    words = words.masked_fill(~word_mask.unsqueeze(-1), 9.0)
    tokens = tokens.masked_fill(~token_mask.unsqueeze(-1), -9.0)
    torch.testing.assert_close(score(module, words, word_mask, tokens, token_mask, pair_mask), found)
    assert not torch.allclose(score(module, words, word_mask, tokens, token_mask), found)
    with pytest.raises(ValueError, match="built for 6 tokens per text and 7 per video, but got 6 and 6"):
        score(module, words, word_mask, tokens[:, 1:], token_mask[:, 1:])


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


def test_compacting_drops_only_missing_tokens_and_keeps_the_order():
    mask = torch.tensor([[False, True, False, True, True], [True, False, False, False, True]])
    tokens = WeightedTokens(torch.arange(10.0).view(2, 5, 1), torch.arange(10.0).view(2, 5), mask)
    short = compacted(tokens, 3)
    assert short.logits[short.mask].tolist() == tokens.logits[mask].tolist()
    assert short.mask.tolist() == [[True, True, True], [True, True, False]]
    assert torch.equal(short.vectors.squeeze(-1), short.logits)


def test_a_softmax_without_items_is_zero():
    weights = masked_softmax(torch.randn(2, 3), torch.tensor([[True, True, False], [False, False, False]]))
    torch.testing.assert_close(weights.sum(-1), torch.tensor([1.0, 0.0]))
    assert weights[0, 2] == 0
