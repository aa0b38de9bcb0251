"""DRL without padding, which no recorded case leaves out, and its decorrelation."""

import pytest
import torch
from methods.parts import WIDTH, build, features, moved, paired

from tvr_lightning.methods import DRL
from tvr_lightning.methods.drl import ChannelDecorrelation, DRLHead, NoDecorrelation, TokenWise, WeightedTokenWise


def head(interaction):
    torch.manual_seed(1)
    return moved(DRLHead(WIDTH, interaction))


def terms(decorrelation, pairs=6):
    method = build(DRL, {"decorrelation": decorrelation}, torch.float32)
    return method.losses(paired(*features(pairs, pairs)))


@pytest.mark.parametrize("interaction", [WeightedTokenWise, TokenWise])
def test_scores_without_padding_match_the_definition_pair_by_pair(interaction):
    text, video = features()
    made = head(interaction(mask_fill="exclude"))
    similarity = made(text, video).similarity
    words, frames = made.prepare(text, video)
    for i in range(len(text)):
        for j in range(len(video)):
            cosines = words.tokens[i, words.mask[i]] @ frames.tokens[j, frames.mask[j]].T
            of_words = words.weights[i, words.mask[i]] @ cosines.amax(1)
            of_frames = frames.weights[j, frames.mask[j]] @ cosines.amax(0)
            assert similarity[i, j].item() == pytest.approx((of_words + of_frames).item() / 2, abs=1e-6)


@pytest.mark.parametrize("tokens", ["random", "matched", "weighted"])
def test_decorrelation_has_the_weights_of_its_options(tokens):
    options = [{}, {"weight": 0.002}, {"off_diagonal": 0.0}, {"on_diagonal": 0.0}]
    usual, twice, diagonal, rest = (
        terms(ChannelDecorrelation(tokens, **each))["decorrelation"].item() for each in options
    )
    assert twice == pytest.approx(2 * usual)
    assert diagonal + rest == pytest.approx(usual)
    assert min(diagonal, rest) > 0


def test_decorrelation_can_be_left_out():
    assert set(terms(NoDecorrelation())) == set(terms(ChannelDecorrelation(weight=0.0))) == {"info_nce"}
    with pytest.warns(UserWarning, match="too few tokens for a variance"):
        assert set(terms(ChannelDecorrelation("random"), pairs=1)) == {"info_nce"}
    assert set(terms(ChannelDecorrelation("random"), pairs=2)) == {"info_nce", "decorrelation"}


def test_random_tokens_are_never_padding():
    made = head(WeightedTokenWise())
    text, video = features()
    text.words.masked_fill_(~text.word_mask[..., None], torch.nan)
    for _ in range(5):
        assert bool(made.correlations(text[:4], video, "random").isfinite().all())
