"""TC-MGC: its options in both forms of pair vectors, its losses, and the reorganization and aggregation of slots."""

import itertools

import pytest
import torch
from methods.parts import DOUBLE, FORMS, build, close, features, moved, paired

from tvr_lightning.layers.aggregation import (
    ISA,
    BidirectionalAggregation,
    MeanAggregation,
    SoftmaxAggregation,
    weighted_sum,
)
from tvr_lightning.methods import TCMGC
from tvr_lightning.methods.tcmgc.model import LinearSoftmaxAggregation, TCMGCHead
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention, SlotReorganization, TCMGCOptions
from tvr_lightning.methods.tcmgc.reorganization import parted, reorganize
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
SUBSETS = [subset for size in (1, 3) for subset in itertools.combinations(CONTRASTS, size)]
NO_DECORRELATION = Decorrelation(weight=0.0)
UNCONDITIONED = {"attention": None}
MASKED = {"mask_frames": True, "mask_words": True}
ATTENTIONS = [{"heads": 4}, {"projections": True}, {"heads": 2, "projections": True}, {"residual": False}]
SWITCHES = [
    {},
    *({"attention": LanguageVideoAttention(dropout=0.0, **options)} for options in ATTENTIONS),
    {"mask_frames": True},
    {"mask_words": True},
    {**MASKED, "similarity_aggregation": MeanAggregation()},
    *({"similarity_aggregation": kind} for kind in (SoftmaxAggregation(), MeanAggregation(), ISA(1.0))),
    {"aggregation": "softmax"},
    {"aggregation": "mean"},
    {"aggregation": "softmax", "aggregation_on": "cosines"},
    {"aggregation_on": "cosines"},
    {"interaction_matrices": False},
    {"keep_rate": 0.7},
    *({"reorganization": SlotReorganization(mode, mode, mode, mode)} for mode in ("off", "fusion", "removal")),
    {"reorganization": SlotReorganization(frames="off")},
    {"reorganization": SlotReorganization(words="off", frames="fusion")},
    UNCONDITIONED,
    {**UNCONDITIONED, "similarity_aggregation": SoftmaxAggregation()},
    {**UNCONDITIONED, **MASKED},
    *({"contrasts": subset, "decorrelation": NO_DECORRELATION} for subset in SUBSETS),
]


@pytest.mark.parametrize("options", SWITCHES)
def test_every_option_changes_the_scores_equally_in_both_forms(options):
    text, video = inputs()
    results, grads = [], []
    for form, kind in FORMS.items():
        head = random_head(form, **options)
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
    if options:
        usual = random_head()(text, video, SCALE).similarity
        assert not torch.allclose(scores.similarity, usual, atol=1e-6)


def test_the_loss_can_be_a_sum_without_decorrelation():
    text, video = features(5, 5, **DOUBLE)
    options = {"attention": LanguageVideoAttention(dropout=0.0), "decorrelation": NO_DECORRELATION}
    usual, summed = (build(TCMGC, options | {"loss_reduction": how}) for how in ("mean", "sum"))
    batch = paired(text, usual.encode_video(video))
    torch.testing.assert_close(summed.losses(batch), {"info_nce": 2 * usual.losses(batch)["info_nce"]})


def test_frames_before_the_temporal_encoder_are_kept_only_for_contrasts_that_use_them():
    _, video = features()
    video.clip_frames = None
    assert build(TCMGC, {}, torch.float32).encode_video(video).clip_frames is None
    kept = build(TCMGC, {"attention": None}, torch.float32).encode_video(video)
    assert torch.equal(kept.clip_frames, video.frames)
    assert not torch.allclose(kept.frames, video.frames)


# Slots


def test_initial_matrices_are_identities():
    module = BidirectionalAggregation(ISA(), frames=4, words=3)
    assert [tuple(p.shape) for p in module.parameters()] == [(3, 3), (4, 4), (4, 4), (3, 3)]
    assert all(torch.equal(p, torch.eye(len(p))) for p in module.parameters())
    scores = torch.randn(4, 5, 6)
    torch.testing.assert_close(LinearSoftmaxAggregation(4)(scores), scores.softmax(0))


@pytest.mark.parametrize(("dim", "kept"), [(0, 1), (1, 3), (2, 8), (3, 12)])
def test_the_largest_slots_are_kept(dim, kept):
    torch.manual_seed(0)
    slots = torch.randint(0, 9, (13, 12, 14, 15)).float().movedim(dim, 0)  # many ties
    expected = slots.sort(0, descending=True).values
    with torch.no_grad():
        top, rest = parted(slots, kept, rest=True)
        assert torch.equal(parted(slots, kept, rest=False)[0], top)
    assert torch.equal(top, expected[:kept])
    assert torch.equal(rest.sort(0, descending=True).values, expected[kept:])
    assert torch.equal(parted(slots.clone().requires_grad_(), kept, rest=False)[0], top)


@pytest.mark.parametrize("mode", ["off", "removal", "fusion"])
@pytest.mark.parametrize(
    "module", [ISA(10.0).module(0), SoftmaxAggregation(10.0).module(4), MeanAggregation().module(4)]
)
def test_missing_slots_do_not_change_the_score(module, mode):
    torch.manual_seed(0)
    present = torch.rand(6, 5)
    slots = torch.cat([present, torch.full((3, 5), -torch.inf)]).requires_grad_()
    few, many = reorganize(present, 2, mode), reorganize(slots, 2, mode)
    if module.weight is not None:
        matrix = torch.randn(9, 9)
        module.weight = torch.nn.Parameter(matrix[: len(few), : len(few)])
        expected = module(few)
        module.weight = torch.nn.Parameter(matrix[: len(many), : len(many)])
    else:
        expected = module(few)
    score = module(many)
    torch.testing.assert_close(score, expected)
    score.sum().backward()
    assert slots.grad.isfinite().all()
    assert not slots.grad[6:].any()


def test_the_score_of_no_slots_is_minus_infinity():
    slots = torch.full((4, 2), -torch.inf)
    slots[0, 0] = 0.5
    for kind in (ISA(100.0), SoftmaxAggregation(100.0), MeanAggregation()):
        assert kind.module(4)(slots).tolist() == [0.5, -torch.inf]
    assert weighted_sum(slots, slots).tolist() == [0.5, -torch.inf]
    assert reorganize(slots, 1, "fusion")[:, 0].tolist() == [0.5, -torch.inf]
