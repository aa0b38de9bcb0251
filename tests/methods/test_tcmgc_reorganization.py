import pytest
import torch

from tvr_lightning.layers.aggregation import (
    ISA,
    BidirectionalAggregation,
    MeanAggregation,
    SoftmaxAggregation,
    weighted_sum,
)
from tvr_lightning.methods.tcmgc.model import LinearSoftmaxAggregation
from tvr_lightning.methods.tcmgc.reorganization import kept_slots, parted, reorganize
from tvr_lightning.methods.xclip import AOSM

MODES = ["off", "removal", "fusion"]


def test_bidirectional_softmax_is_softmax_twice():
    torch.manual_seed(0)
    matrix = torch.rand(4, 3, 5)
    softmax = SoftmaxAggregation(7.0).module(4)
    module = BidirectionalAggregation(SoftmaxAggregation(7.0), 4, 3)
    expected = (softmax(softmax(matrix)) + softmax(softmax(matrix.transpose(0, 1)))) / 2
    torch.testing.assert_close(module(matrix), expected)
    assert not list(module.parameters())


def test_identity_matrices_at_the_start():
    module = BidirectionalAggregation(ISA(), frames=4, words=3)
    assert [tuple(p.shape) for p in module.parameters()] == [(3, 3), (4, 4), (4, 4), (3, 3)]
    assert all(torch.equal(p, torch.eye(len(p))) for p in module.parameters())
    scores = torch.randn(4, 5, 6)
    torch.testing.assert_close(LinearSoftmaxAggregation(4)(scores), scores.softmax(0))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("kept", [1, 3, 8, 12])
def test_kept_slots_are_the_largest_and_the_rest_is_what_is_left(dim, kept):
    torch.manual_seed(0)
    slots = torch.randint(0, 9, (13, 12, 14, 15)).float().movedim(dim, 0)  # many ties
    expected = slots.sort(0, descending=True).values
    with torch.no_grad():
        top, rest = parted(slots, kept, rest=True)
        assert torch.equal(parted(slots, kept, rest=False)[0], top)
    assert torch.equal(top, expected[:kept])
    assert torch.equal(rest.sort(0, descending=True).values, expected[kept:])
    assert torch.equal(parted(slots.clone().requires_grad_(), kept, rest=False)[0], top)


@pytest.mark.parametrize("absent", [0, 2, 5])
@pytest.mark.parametrize("kind", [ISA(7.0), SoftmaxAggregation(7.0), MeanAggregation(), AOSM(7.0)])
def test_similarities_may_come_times_the_temperature(kind, absent):
    torch.manual_seed(0)
    module, similarities = kind.module(5), torch.randn(5, 4)
    similarities[5 - absent :, 0] = -torch.inf
    scaled = module.temperature * similarities
    torch.testing.assert_close(module(scaled, scaled=True), module(similarities))
    assert bool(torch.isfinite(module(scaled, scaled=True)).all()) == (absent < 5)


def test_gradient_goes_to_the_kept_slots():
    slots = torch.tensor([0.3, 0.9, 0.1, 0.5], requires_grad=True)
    reorganize(slots, 2, "removal").sum().backward()
    assert slots.grad.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "module", [ISA(10.0).module(0), SoftmaxAggregation(10.0).module(4), MeanAggregation().module(4)]
)
def test_absent_slots_change_nothing(module, mode):
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


def test_nothing_there_is_minus_infinity():
    slots = torch.full((4, 2), -torch.inf)
    slots[0, 0] = 0.5
    for kind in (ISA(100.0), SoftmaxAggregation(100.0), MeanAggregation()):
        assert kind.module(4)(slots).tolist() == [0.5, -torch.inf]
    assert weighted_sum(slots, slots).tolist() == [0.5, -torch.inf]
    assert reorganize(slots, 1, "fusion")[:, 0].tolist() == [0.5, -torch.inf]


@pytest.mark.parametrize(("rate", "kept"), [(0.1, 3), (0.2, 6), (0.3, 9), (0.5, 16), (0.9, 28), (1.0, 32)])
def test_kept_slots_are_the_papers(rate, kept):
    assert kept_slots(32, rate, "removal", "words") == kept
    assert kept_slots(32, 0.0, "off", "words") == 32


@pytest.mark.parametrize(
    ("rate", "mode", "message"),
    [
        (0.02, "removal", "keep_rate 0.02 keeps 0 of 32 slots of reorganization.words"),
        (1.1, "removal", r"between 0.0312 and 1"),
        (1.0, "fusion", "nothing to fuse"),
    ],
)
def test_keep_rates_that_keep_nothing_or_leave_nothing_are_refused(rate, mode, message):
    with pytest.raises(ValueError, match=message):
        kept_slots(32, rate, mode, "words")
