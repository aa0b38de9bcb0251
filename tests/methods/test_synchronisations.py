"""A training step's losses make no device wait: no number is read back, and no size depends on numbers.

What a GPU would wait for is told by the operators that the losses call on a CPU.
"""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvr_lightning.testing import method_recipes, random_pairs, small

RECIPES = method_recipes(Path(__file__).parents[2] / "recipes")
WAITING = {
    "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "nonzero_static", "unique_consecutive",
    "_unique2", "unique_dim", "bincount", "repeat_interleave.Tensor",
}  # fmt: skip
VARIANTS = {
    "TCMGC": {
        "dropout per video": ["--model.init_args.tcmgc.attention.dropout_per=video"],
        "masked words": ["--model.init_args.tcmgc.mask_words=true"],
        "negatives": ["--model.init_args.tcmgc.decorrelation.pairs=negatives"],
    },
}
REMAINING = {
    # How many tokens the longest set has, and whether any is padded, before the maxima.
    "DPDV": {"_local_scalar_dense"},
    # Whether any token is padded; the decorrelation picks the real tokens.
    "DRL": {"_local_scalar_dense", "index.Tensor by truth values", "index_put by truth values"},
}
"""What still makes a device wait, by method, with the operators."""


class Waits(TorchDispatchMode):
    """Notes every operator whose result a host would have to read before it goes on."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.removesuffix(".default")
        if name in WAITING or name.partition(".")[0] in WAITING:
            self.found.add(name)
        if name.startswith(("index.", "index_put")):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.found.add(f"{name} by truth values")
        return function(*args, **(kwargs or {}))


def waits_of(title, *overrides):
    method, _ = small(RECIPES[title], *overrides)
    method.train()
    pairs = method.pair_features(random_pairs(method, 6)).float()
    with Waits() as waits:
        terms = method.contrast.terms(method.losses, pairs)
        torch.stack([term.reshape(()) for term in terms.values()]).sum().backward()
    return waits.found


def test_a_wait_is_noticed():
    with Waits() as waits:
        numbers = torch.arange(3.0)
        bool((numbers > 1).any())
        numbers[numbers > 1]
    assert {"_local_scalar_dense", "index.Tensor by truth values"} <= waits.found


@pytest.mark.parametrize("title", RECIPES)
def test_losses_do_not_wait(title):
    assert waits_of(title) == REMAINING.get(title, set())


@pytest.mark.parametrize(("title", "name"), [(title, name) for title, found in VARIANTS.items() for name in found])
def test_options_do_not_make_losses_wait(title, name):
    assert not waits_of(title, *VARIANTS[title][name])
