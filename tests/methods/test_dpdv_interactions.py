"""Interactions against their definitions pair by pair, and padding, blocks and choices of frames."""

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


def sides(seed=0):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(N, W, D, generator=generator)
    tokens = torch.randn(M, T, D, generator=generator)
    word_mask = torch.arange(W) < torch.tensor([6, 2, 4, 1, 3])[:, None]
    token_mask = torch.rand(M, T, generator=generator) < 0.6
    token_mask[:, 0] = True
    pair_mask = torch.rand(N, M, T, generator=generator) < 0.6
    pair_mask[:, :, 0] = True
    return words, word_mask, tokens, token_mask, pair_mask


def interactions():
    torch.manual_seed(1)
    made = {
        "mean": MeanInteraction(),
        "ucofia": SimilarityAggregation(W, T, temperature=10.0),
        "weighted-max": WeightedMax(D),
    }
    for module in made.values():
        for parameter in module.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return made


def plain(name, module, words, tokens):
    """The score of one pair from the tokens that are there, (w, D) and (t, D)."""
    cosine = unit(words) @ unit(tokens).T
    if name == "mean":
        return unit(words.mean(0)) @ unit(tokens.mean(0))
    if name == "weighted-max":
        word, token = (
            layer.layers(side).squeeze(-1).softmax(0)
            for layer, side in ((module.text_weights, words), (module.video_weights, tokens))
        )
        return (word @ cosine.amax(1) + token @ cosine.amax(0)) / 2
    raise AssertionError(name)


@pytest.mark.parametrize("pairwise", [False, True])
@pytest.mark.parametrize("name", ["mean", "weighted-max"])
def test_scores_are_those_of_each_pair_alone(name, pairwise):
    module = interactions()[name]
    words, word_mask, tokens, token_mask, pair_mask = sides()
    found = module(
        module.prepared("text", words, word_mask),
        module.prepared("video", tokens, token_mask),
        pair_mask if pairwise else None,
    )
    for i in range(N):
        for j in range(M):
            there = token_mask[j] & pair_mask[i, j] if pairwise else token_mask[j]
            if there.any():
                expected = plain(name, module, words[i, word_mask[i]], tokens[j, there])
                torch.testing.assert_close(found[i, j], expected, rtol=1e-5, atol=1e-6)
            else:
                assert found[i, j] == 0


def test_aggregation_leaves_out_what_is_not_there():
    module = interactions()["ucofia"]
    words, word_mask, tokens, token_mask, pair_mask = sides()
    text, video = module.prepared("text", words, word_mask), module.prepared("video", tokens, token_mask)
    found = module(text, video, pair_mask)
    noisy = module(
        module.prepared("text", words.masked_fill(~word_mask.unsqueeze(-1), 9.0), word_mask),
        module.prepared("video", tokens.masked_fill(~token_mask.unsqueeze(-1), -9.0), token_mask),
        pair_mask,
    )
    torch.testing.assert_close(found, noisy)
    assert not torch.allclose(found, module(text, video))


def test_aggregation_with_identities_and_one_word_is_the_double_softmax():
    module = SimilarityAggregation(1, T, temperature=10.0)
    _, _, tokens, _, _ = sides()
    sentence = torch.randn(N, 1, D)
    cosine = torch.einsum("nd,mtd->nmt", unit(sentence[:, 0]), unit(tokens))
    expected = ((10 * (10 * cosine).softmax(-1)).softmax(-1) * cosine).sum(-1)
    ones = torch.ones(N, 1, dtype=torch.bool), torch.ones(M, T, dtype=torch.bool)
    torch.testing.assert_close(
        module(module.prepared("text", sentence, ones[0]), module.prepared("video", tokens, ones[1])), expected
    )


def test_aggregation_says_which_sizes_it_is_for():
    module = SimilarityAggregation(W, T)
    words, word_mask, tokens, token_mask, _ = sides()
    with pytest.raises(ValueError, match="built for 6 tokens per text and 7 per video, but got 6 and 6"):
        module(module.prepared("text", words, word_mask), module.prepared("video", tokens[:, 1:], token_mask[:, 1:]))


def test_single_sentences_are_simplified_to_the_weighted_sum():
    torch.manual_seed(0)
    sentence, tokens = torch.randn(N, 1, D), torch.randn(M, T, D)
    one, mask = torch.ones(N, 1, dtype=torch.bool), torch.arange(T) < torch.tensor([7, 3, 5, 1])[:, None]
    eq6, eq5 = WeightedMax(D, text_weights=False, simplified=True), WeightedMax(D, text_weights=False)
    eq5.load_state_dict(eq6.state_dict())
    text, video = eq6.prepared("text", sentence, one), eq6.prepared("video", tokens, mask)
    cosine = torch.einsum("nd,mtd->nmt", text.vectors[:, 0], video.vectors)
    simplified = (cosine * video.weights).sum(-1)
    torch.testing.assert_close(eq6(text, video), simplified)
    best = cosine.masked_fill(~mask, -2).amax(-1)
    torch.testing.assert_close(eq5(text, video), (simplified + best) / 2)


@pytest.mark.parametrize("name", ["mean", "ucofia", "weighted-max"])
def test_a_side_without_tokens_scores_zero_with_finite_gradients(name):
    module = interactions()[name]
    words, word_mask, tokens, token_mask, pair_mask = sides()
    word_mask[1] = False
    token_mask[2] = False
    words.requires_grad_()
    for chosen in (None, pair_mask):
        found = module(module.prepared("text", words, word_mask), module.prepared("video", tokens, token_mask), chosen)
        assert bool((found[1] == 0).all())
        assert bool((found[:, 2] == 0).all())
        found.sum().backward()
        assert bool(words.grad.isfinite().all())


def test_compacting_keeps_order_and_drops_only_what_is_not_there():
    mask = torch.tensor([[False, True, False, True, True], [True, False, False, False, True]])
    tokens = WeightedTokens(torch.arange(10.0).view(2, 5, 1), torch.arange(10.0).view(2, 5), mask)
    short = compacted(tokens)
    assert short.logits[short.mask].tolist() == tokens.logits[mask].tolist()
    assert short.mask.tolist() == [[True, True, True], [True, True, False]]
    assert torch.equal(short.vectors.squeeze(-1), short.logits)


def test_a_softmax_over_nothing_is_zero():
    weights = masked_softmax(torch.randn(2, 3), torch.tensor([[True, True, False], [False, False, False]]))
    torch.testing.assert_close(weights.sum(-1), torch.tensor([1.0, 0.0]))
    assert weights[0, 2] == 0
