"""UCoFiA's selection of patches: noise, its gradient, and what evaluation does."""

import pytest
import torch
from methods.parts import moved

from tvr_lightning.layers.patch_selector import PatchScores, PatchSelection, PatchSelector, perturbed_top_k

M, F, P, D = 2, 3, 9, 16


def selector(**options):
    torch.manual_seed(0)
    return moved(PatchSelector(D, PatchSelection(**options)), 0.3)


def media(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(M, F, D, generator=generator), torch.randn(M, F, P, D, generator=generator)


@pytest.mark.parametrize(
    ("options", "training", "drawn"), [({}, True, True), ({}, False, False), ({"noise_eval": True}, False, True)]
)
def test_noise_is_drawn_in_training_and_on_demand_in_evaluation(options, training, drawn):
    made = selector(samples=20, sigma=0.5, **options).train(training)
    first = made(*media())
    assert torch.equal(made(*media()), first) is not drawn
    if training:
        first.square().sum().backward()
        assert all(bool((p.grad != 0).any()) for p in made.parameters())


def test_the_gradient_is_the_diagonal_of_the_jacobian():
    scores, noise = torch.randn(1, 5, dtype=torch.float64, requires_grad=True), torch.randn(1, 40000, 5).double()
    weight = torch.randn(1, 1, 5, dtype=torch.float64)
    soft = perturbed_top_k(scores, noise, 1, 0.7)
    (gradient,) = torch.autograd.grad((soft * weight).sum(), scores)
    step = 0.05
    for place in range(5):
        moved = torch.zeros(1, 5, dtype=torch.float64)
        moved[0, place] = step
        with torch.no_grad():
            change = perturbed_top_k(scores + moved, noise, 1, 0.7) - perturbed_top_k(scores - moved, noise, 1, 0.7)
        expected = weight[0, 0, place] * change[0, 0, place] / (2 * step)
        assert abs(float(gradient[0, place] - expected)) < 0.05 * max(float(weight.abs().max()), 1)


def test_bad_options_are_rejected():
    with pytest.raises(ValueError, match=r"PatchSelection\.kept is 0"):
        PatchSelection(kept=0)
    with pytest.raises(ValueError, match="must be even"):
        PatchScores(7)
    with pytest.raises(ValueError, match=r"9 patches per frame, but patch_selection\.kept 10"):
        selector(kept=10)(*media())
