"""The examples in docstrings run."""

import doctest
import importlib

import pytest

MODULES = ["pairwise", "training.losses", "evaluation.metrics", "evaluation.normalization"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_show_what_comes_out(name):
    module = importlib.import_module(f"tvr_lightning.{name}")
    examples = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert examples.attempted
    assert not examples.failed, "see the output"
