"""DRL against the authors' code, a plain restatement, and its switches one by one."""

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
    DotProduct,
    DRLHead,
    NoDecorrelation,
    TokenWise,
    WeightedTokenWise,
    channel_correlation,
    decorrelation_sums,
)

INTERACTIONS = {"wti": WeightedTokenWise, "ti": TokenWise, "dp": DotProduct}


def head(interaction="wti", **options):
    torch.manual_seed(1)
    return moved(DRLHead(WIDTH, INTERACTIONS[interaction](**options)))


def method(**options):
    return build(DRL, options, torch.float32)


def pairs(count=6):
    return paired(*features(count, count))


@pytest.mark.parametrize("temporal", [SeqTransf(), MeanP()])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_authors_checkpoint_loads_whatever_its_weighting_networks(parity_cases, layers, temporal):
    clip = load_case(parity_cases / "clip4clip_seqTransf.safetensors").checkpoint
    if temporal == MeanP():
        clip = {name: t for name, t in clip.items() if not name.startswith("transformerClip.")}
    names = {1: [""], 2: ["0.", "2."], 3: ["0.", "2.", "4."]}[layers]
    for side in ("text", "video"):
        for name in names:
            outputs = 1 if name == names[-1] else 64
            clip[f"{side}_weight_fc.{name}weight"] = torch.randn(outputs, 64)
            clip[f"{side}_weight_fc.{name}bias"] = torch.randn(outputs)
    module = import_checkpoint(clip, "file", words=12, frames=6)
    assert (module.temporal is None) is (temporal == MeanP())
    text, video = features()
    weights = module.head.prepare(text, video)[0].weights
    logits = text.words
    for name in names:
        if name != names[0]:
            logits = logits.relu()
        logits = logits @ clip[f"text_weight_fc.{name}weight"].T + clip[f"text_weight_fc.{name}bias"]
    expected = logits.squeeze(-1).masked_fill(~text.word_mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, expected)
    del clip["video_weight_fc." + names[0] + "bias"]
    with pytest.raises(UserError, match="missing"):
        import_checkpoint(clip, "file", words=12, frames=6)


@pytest.mark.parametrize("mask_fill", ["zero", "exclude"])
@pytest.mark.parametrize("interaction", ["wti", "ti"])
def test_scores_are_the_definition_pair_by_pair(interaction, mask_fill):
    text, video = features()
    made = head(interaction, mask_fill=mask_fill)
    similarity = made(text, video).similarity
    words, frames = made.prepare(text, video)
    for i in range(len(text)):
        for j in range(len(video)):
            cosines = words.tokens[i] @ frames.tokens[j].T
            both = words.mask[i][:, None] & frames.mask[j]
            total = 0.0
            for own, there, best_of in ((words.weights[i], words.mask[i], 1), (frames.weights[j], frames.mask[j], 0)):
                padded = cosines.masked_fill(~both, 0.0 if mask_fill == "zero" else -torch.inf)
                best = padded.amax(best_of)
                total += sum((own[k] * best[k]).item() for k in range(len(own)) if there[k]) / 2
            assert similarity[i, j].item() == pytest.approx(total, abs=1e-6)


def test_weights_add_up_to_one_over_real_tokens_and_ti_weighs_evenly():
    text, video = features()
    for interaction in ("wti", "ti"):
        weights = head(interaction).prepare(text, video)[0].weights
        torch.testing.assert_close(weights.sum(1), torch.ones(5))
        assert bool((weights[~text.word_mask] == 0).all())
    torch.testing.assert_close(weights, text.word_mask / text.word_mask.sum(1, keepdim=True))


def test_dot_product_takes_the_last_word_and_the_pooled_frames():
    text, video = features()
    unit = torch.nn.functional.normalize
    similarity = head("dp")(text, video).similarity
    for i in range(len(text)):
        last = unit(text.words[i, int(text.word_mask[i].sum()) - 1], dim=0)
        for j in range(len(video)):
            pooled = unit(unit(video.frames[j][video.frame_mask[j]], dim=-1).mean(0), dim=0)
            assert similarity[i, j].item() == pytest.approx((last @ pooled).item(), abs=1e-6)


def test_correlation_of_equal_tokens_is_that_of_their_channels():
    tokens = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    correlation = channel_correlation(tokens, tokens)
    torch.testing.assert_close(correlation, torch.corrcoef(tokens.T) * 49 / 50)
    on_diagonal, off_diagonal = decorrelation_sums(correlation)
    assert on_diagonal.item() == pytest.approx(3 / 50**2)
    assert off_diagonal.item() == pytest.approx((correlation - correlation.diag().diag()).square().sum().item())
    weights = torch.full((50,), 1 / 50, dtype=torch.float64)
    torch.testing.assert_close(channel_correlation(tokens, tokens, weights), correlation)


@pytest.mark.parametrize("tokens", ["random", "matched", "weighted"])
def test_decorrelation_is_weighted_and_can_be_left_out(tokens):
    terms = {}
    for name, options in {
        "default": ChannelDecorrelation(tokens),
        "twice": ChannelDecorrelation(tokens, weight=0.002),
        "diagonal": ChannelDecorrelation(tokens, off_diagonal=0.0),
        "rest": ChannelDecorrelation(tokens, on_diagonal=0.0),
    }.items():
        torch.manual_seed(3)
        model = method(decorrelation=options)
        torch.manual_seed(4)
        terms[name] = model.losses(pairs())["decorrelation"].item()
    assert terms["twice"] == pytest.approx(2 * terms["default"])
    assert terms["diagonal"] + terms["rest"] == pytest.approx(terms["default"])
    assert terms["diagonal"] > 0
    assert terms["rest"] > 0
    assert set(method(decorrelation=NoDecorrelation()).losses(pairs())) == {"info_nce"}
    assert set(method(decorrelation=ChannelDecorrelation(weight=0.0)).losses(pairs())) == {"info_nce"}


def test_a_single_pair_has_no_variance_over_random_tokens():
    with pytest.warns(UserWarning, match="too few tokens for a variance"):
        terms = method(decorrelation=ChannelDecorrelation("random")).losses(pairs(1))
    assert set(terms) == {"info_nce"}


def test_random_tokens_are_real_ones():
    made = head()
    text, video = features()
    text.words.masked_fill_(~text.word_mask[..., None], torch.nan)
    for _ in range(5):
        assert bool(made.correlations(text[:4], video, "random").isfinite().all())
