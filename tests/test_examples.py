"""The examples in docstrings run, and every public function that users compute with has one."""

import dataclasses
import doctest
import importlib
import inspect

import pytest

EVERY_FUNCTION = ["tvr_lightning.evaluation.metrics", "tvr_lightning.evaluation.normalization"]


def needing_examples(module):
    """Names and objects: public functions, and classes of which there are objects."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) or (inspect.isclass(value) and not is_description(value)):
            yield name, value


def is_description(cls):
    return inspect.isabstract(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, tuple)


@pytest.mark.parametrize("name", ["tvr_lightning.pairwise", "tvr_lightning.training.losses", *EVERY_FUNCTION])
def test_examples_show_what_comes_out(name):
    module = importlib.import_module(name)
    examples = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert examples.attempted
    assert not examples.failed, "see the output"


@pytest.mark.parametrize("name", EVERY_FUNCTION)
def test_every_public_function_has_an_example(name):
    found = dict(needing_examples(importlib.import_module(name)))
    assert found
    assert not [name for name, value in found.items() if ">>>" not in (value.__doc__ or "")]
