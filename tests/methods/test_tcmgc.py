"""TC-MGC: both forms against each other over every switch, its parameters, losses and aggregation."""

import dataclasses
import itertools

import pytest
import torch
from methods.parts import DOUBLE, FORMS, build, close, features, moved, paired

from tvr_lightning.layers.aggregation import ISA, MeanAggregation, SoftmaxAggregation
from tvr_lightning.methods import TCMGC
from tvr_lightning.methods.tcmgc.model import TCMGCHead
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention, SlotReorganization, TCMGCOptions
from tvr_lightning.pairwise import DensePairVectors, PairVectors
from tvr_lightning.training.losses import info_nce

CONTRASTS = ("video_sentence", "video_word", "sentence_frame", "frame_word")
N, M, W, F, D = 5, 4, 10, 3, 16


def inputs():
    return features(N, M, words=W, frames=F, width=D, **DOUBLE)


def random_head(form=None, **switches):
    switches = {"attention": LanguageVideoAttention(dropout=0.0), "keep_rate": 0.4, "temporal_layers": 0} | switches
    torch.manual_seed(1)
    head = moved(TCMGCHead(D, W, F, TCMGCOptions(**switches)).double(), 0.1)
    head.required_form = FORMS.get(form)
    return head


SCALE = torch.tensor(20.0, dtype=torch.double)
SUBSETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(CONTRASTS, size)]
NO_DECORRELATION = Decorrelation(weight=0.0)
UNCONDITIONED = {"attention": None}
SWITCHES = {
    "defaults": {},
    "two heads": {"attention": LanguageVideoAttention(heads=2, dropout=0.0)},
    "four heads": {"attention": LanguageVideoAttention(heads=4, dropout=0.0)},
    "projections": {"attention": LanguageVideoAttention(dropout=0.0, projections=True)},
    "two heads with projections": {"attention": LanguageVideoAttention(heads=2, dropout=0.0, projections=True)},
    "no residual": {"attention": LanguageVideoAttention(dropout=0.0, residual=False)},
    "masked frames": {"mask_frames": True},
    "masked words": {"mask_words": True},
    "both masked": {"mask_frames": True, "mask_words": True, "similarity_aggregation": MeanAggregation()},
    "softmax slots": {"similarity_aggregation": SoftmaxAggregation()},
    "mean slots": {"similarity_aggregation": MeanAggregation()},
    "lambda": {"similarity_aggregation": ISA(1.0)},
    "softmax contrasts": {"aggregation": "softmax"},
    "mean contrasts": {"aggregation": "mean"},
    "softmax of cosines": {"aggregation": "softmax", "aggregation_on": "cosines"},
    "lsa of cosines": {"aggregation_on": "cosines"},
    "no interaction matrices": {"interaction_matrices": False},
    "keep rate": {"keep_rate": 0.7},
    "all off": {"reorganization": SlotReorganization("off", "off", "off", "off")},
    "words only": {"reorganization": SlotReorganization(frames="off")},
    "frames only": {"reorganization": SlotReorganization(words="off", frames="fusion")},
    "all fused": {"reorganization": SlotReorganization("fusion", "fusion", "fusion", "fusion")},
    "all removed": {"reorganization": SlotReorganization("removal", "removal", "removal", "removal")},
    "unconditioned": UNCONDITIONED,
    "unconditioned softmax": {**UNCONDITIONED, "similarity_aggregation": SoftmaxAggregation()},
    "unconditioned masked": {**UNCONDITIONED, "mask_frames": True, "mask_words": True},
    **{f"only {', '.join(s)}": {"contrasts": s, "decorrelation": NO_DECORRELATION} for s in SUBSETS},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_is_equal_in_both_forms_and_changes_something(name):
    text, video = inputs()
    results, grads = [], []
    for form, kind in FORMS.items():
        head = random_head(form, **SWITCHES[name])
        assert head.form is kind
        scores, square = head(text, video, SCALE), head(text[:M], video, SCALE)
        loss = info_nce(SCALE * square.similarity, reduction=head.options.loss_reduction)
        if len(scores.parts) > 1:
            loss = loss + head.decorrelation(square, SCALE)
        results.append([scores.similarity, *scores.parts.values()])
        grads.append(torch.autograd.grad(loss, list(head.parameters())))
    close(*results, rtol=1e-9, atol=1e-9)
    close(*grads, rtol=1e-7, atol=1e-9)
    assert all(gradient.isfinite().all() for gradient in grads[0])
    if name != "defaults":
        usual = random_head()(text, video, SCALE).similarity
        assert not torch.allclose(scores.similarity, usual, atol=1e-6)


def test_order_of_words_does_not_matter_but_order_of_frames_is_for_the_temporal_encoder():
    text, video = inputs()
    head = random_head()
    expected = head(text, video, SCALE).similarity
    shuffled = dataclasses.replace(text, words=text.words[:, torch.randperm(W)])
    torch.testing.assert_close(head(shuffled, video, SCALE).similarity, expected)
    video = dataclasses.replace(video, frames=video.frames.flip(1))
    torch.testing.assert_close(head(text, video, SCALE).similarity, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("switches", [{}, {**UNCONDITIONED, "mask_frames": True}, {"mask_frames": True}])
def test_masked_padding_has_no_effect(form, switches):
    text, video = inputs()
    head = random_head(form, mask_words=True, **switches)
    scores = head(text, video, SCALE).similarity
    noise = torch.where(text.word_mask.unsqueeze(-1), text.words, torch.randn_like(text.words))
    other = dataclasses.replace(text, words=noise)
    torch.testing.assert_close(head(other, video, SCALE).similarity, scores)
    if switches:
        mask = video.frame_mask.unsqueeze(-1)
        other = dataclasses.replace(video, frames=video.frames * mask, clip_frames=video.clip_frames * mask + ~mask)
        torch.testing.assert_close(head(text, other, SCALE).similarity, scores)
    grads = torch.autograd.grad(scores.sum(), list(head.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("switches", [{"mask_frames": True}, {}, UNCONDITIONED])
def test_a_video_without_frames_scores_and_trains(switches):
    text, video = inputs()
    video.frame_mask[0] = False
    head = random_head(**switches)
    scores = head(text, video, SCALE).similarity
    scores.sum().backward()
    assert scores.isfinite().all()
    assert all(p.grad.isfinite().all() for p in head.parameters())


def test_dropout_acts_only_in_training_and_the_cheaper_form_is_chosen():
    text, video = inputs()
    head = random_head(attention=LanguageVideoAttention(dropout=0.3)).train()
    assert head.form is PairVectors
    assert not torch.allclose(head(text, video, SCALE).similarity, head(text, video, SCALE).similarity)
    close([head.eval()(text, video, SCALE).similarity], [random_head()(text, video, SCALE).similarity])
    for heads, form in ((8, DensePairVectors), (4, PairVectors)):  # a basis as wide as the vectors, or half as wide
        assert random_head(attention=LanguageVideoAttention(heads=heads, dropout=0.0)).form is form


def test_contrasts_that_are_not_made_leave_no_parameters():
    head = random_head(contrasts=("sentence_frame",), decorrelation=NO_DECORRELATION, aggregation="mean")
    names = {name.split(".")[0] for name, _ in head.named_parameters()}
    assert names == {"attention", "sentence_frame_aggregation"}


# The module


def test_losses_are_infonce_of_the_logits_and_weighted_decorrelation():
    attention = LanguageVideoAttention(dropout=0.0)
    method = build(TCMGC, {"attention": attention})
    text, video = features(5, 5, **DOUBLE)
    batch = paired(text, method.encode_video(video))
    terms = method.losses(batch)
    scores, scale = method.score(batch.text, batch.video), method.temperature()
    torch.testing.assert_close(terms["info_nce"], info_nce(scale * scores.similarity))
    logits = scale * torch.stack(list(scores.parts.values()))
    torch.testing.assert_close(terms["decorrelation"], 0.5 * logits.var(0).diagonal().mean())
    summed = build(TCMGC, {"attention": attention, "loss_reduction": "sum"}).losses(batch)
    torch.testing.assert_close(summed["info_nce"], 2 * terms["info_nce"])
    assert set(build(TCMGC, {"decorrelation": Decorrelation(weight=0.0)}).losses(batch)) == {"info_nce"}


def test_frames_before_the_temporal_encoder_are_kept_where_they_are_contrasted():
    _, video = features()
    video.clip_frames = None
    assert build(TCMGC, {}, torch.float32).encode_video(video).clip_frames is None
    kept = build(TCMGC, {"attention": None}, torch.float32).encode_video(video)
    assert torch.equal(kept.clip_frames, video.frames)
    assert not torch.allclose(kept.frames, video.frames)


def test_decorrelation_lowers_the_variance_it_penalizes():
    text, video = inputs()
    text, variances = text[:M], {}
    for weight in (0.0, 0.5):
        head = random_head(decorrelation=Decorrelation(weight=weight))
        optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
        for _ in range(30):
            scores = head(text, video, SCALE)
            loss = info_nce(SCALE * scores.similarity) + weight * head.decorrelation(scores, SCALE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        variances[weight] = float(head.decorrelation(head(text, video, SCALE), SCALE).detach())
    assert variances[0.5] < 0.5 * variances[0.0]
