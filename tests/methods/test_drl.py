"""DRL against its definition, pair by pair; its decorrelation; authors' checkpoints."""

import pytest
import torch
from methods.parts import WIDTH, build, features, moved, paired
from parity.case import load_case

from tvr_lightning.authors.importer import import_checkpoint
from tvr_lightning.errors import UserError
from tvr_lightning.layers.temporal import MeanP, SeqTransf
from tvr_lightning.methods import DRL
from tvr_lightning.methods.drl import (
    ChannelDecorrelation,
    DRLHead,
    NoDecorrelation,
    TokenWise,
    WeightedTokenWise,
)


def head(interaction):
    torch.manual_seed(1)
    return moved(DRLHead(WIDTH, interaction))


def terms(decorrelation, pairs=6):
    method = build(DRL, {"decorrelation": decorrelation}, torch.float32)
    return method.losses(paired(*features(pairs, pairs)))


@pytest.mark.parametrize(("layers", "temporal"), [(1, MeanP()), (2, SeqTransf()), (3, SeqTransf())])
def test_an_authors_checkpoint_loads_with_its_weighting_networks(parity_cases, layers, temporal):
    clip = load_case(parity_cases / "clip4clip_seqTransf.safetensors").checkpoint
    if temporal == MeanP():
        clip = {name: t for name, t in clip.items() if not name.startswith("transformerClip.")}
    names = ["0.", "2.", "4."][:layers] if layers > 1 else [""]
    for side in ("text", "video"):
        for name in names:
            outputs = 1 if name == names[-1] else 64
            clip[f"{side}_weight_fc.{name}weight"] = torch.randn(outputs, 64)
            clip[f"{side}_weight_fc.{name}bias"] = torch.randn(outputs)
    module = import_checkpoint(clip, "file", words=12, frames=6)
    assert (module.temporal is None) is (temporal == MeanP())
    text, video = features()
    logits = text.words
    for name in names:
        logits = logits.relu() if name != names[0] else logits
        logits = logits @ clip[f"text_weight_fc.{name}weight"].T + clip[f"text_weight_fc.{name}bias"]
    expected = logits.squeeze(-1).masked_fill(~text.word_mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(module.head.prepare(text, video)[0].weights, expected)
    del clip["video_weight_fc." + names[0] + "bias"]
    with pytest.raises(UserError, match="missing"):
        import_checkpoint(clip, "file", words=12, frames=6)


@pytest.mark.parametrize("mask_fill", ["zero", "exclude"])
@pytest.mark.parametrize("interaction", [WeightedTokenWise, TokenWise])
def test_scores_match_the_definition_pair_by_pair(interaction, mask_fill):
    text, video = features()
    made = head(interaction(mask_fill=mask_fill))
    similarity = made(text, video).similarity
    words, frames = made.prepare(text, video)
    torch.testing.assert_close(words.weights.sum(1), torch.ones(5))
    assert bool((words.weights[~text.word_mask] == 0).all())
    if interaction is TokenWise:
        torch.testing.assert_close(words.weights, text.word_mask / text.word_mask.sum(1, keepdim=True))
    for i in range(len(text)):
        for j in range(len(video)):
            both = words.mask[i][:, None] & frames.mask[j]
            cosines = words.tokens[i] @ frames.tokens[j].T
            cosines = cosines.masked_fill(~both, 0.0 if mask_fill == "zero" else -torch.inf)
            of_words = words.weights[i][words.mask[i]] @ cosines.amax(1)[words.mask[i]]
            of_frames = frames.weights[j][frames.mask[j]] @ cosines.amax(0)[frames.mask[j]]
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


def test_random_tokens_are_never_padding():
    made = head(WeightedTokenWise())
    text, video = features()
    text.words.masked_fill_(~text.word_mask[..., None], torch.nan)
    for _ in range(5):
        assert bool(made.correlations(text[:4], video, "random").isfinite().all())
