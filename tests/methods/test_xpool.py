"""X-Pool: dropout and heads. Its scores are compared with the authors' code in tests/parity and tests/pairwise."""

import pytest
import torch
from methods.parts import FORMS, build, features

from tvr_lightning.methods import XPool


def score(form=None, train=False, **options):
    made = build(XPool, options, torch.float32).train(train)
    made.head.required_form = FORMS.get(form)
    torch.manual_seed(0)
    return made.score(*features()).similarity


def test_dropout_acts_in_training_alone_and_heads_change_the_scores():
    expected = score(dropout=0.0)
    assert torch.equal(score(dropout=0.5), expected)
    assert not torch.allclose(score(dropout=0.5, train=True), expected, atol=1e-3)
    assert not torch.allclose(score(dropout=0.0, heads=4), expected, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"heads": 4}, {"dropout_per": "video"}])
def test_both_forms_draw_the_same_dropout(options):
    dense, factorized = (score(form, train=True, dropout=0.5, **options) for form in ("dense", "factorized"))
    torch.testing.assert_close(factorized, dense, rtol=1e-5, atol=1e-6)
