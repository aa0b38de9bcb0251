"""The examples in docstrings run, and every public function of the rooms that users compute with has one."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil

import pytest

import tvr_lightning.pairwise
from tvr_lightning.pairwise import Pairwise

ONE_METHODS_BLOCKS = ("gated", "increment")
ALGEBRA = [info.name for info in pkgutil.iter_modules(tvr_lightning.pairwise.__path__)]
MODULES = [
    "tvr_lightning.evaluation.metrics",
    "tvr_lightning.evaluation.normalization",
    "tvr_lightning.training.losses",
    *(f"tvr_lightning.pairwise.{name}" for name in ALGEBRA if name not in ONE_METHODS_BLOCKS),
]


def needing_examples(module):
    """Names and objects: functions, classes of which there are objects, and the verbs of the algebra."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if value is Pairwise:
            verbs = [verb for verb in vars(Pairwise) if verb in ("__add__", "__sub__") or not verb.startswith("_")]
            yield from ((f"Pairwise.{verb}", getattr(Pairwise, verb)) for verb in verbs)
        elif inspect.isfunction(value) or (inspect.isclass(value) and not is_description(value)):
            yield name, value


def is_description(cls):
    return inspect.isabstract(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, tuple)


@pytest.mark.parametrize("name", MODULES)
def test_examples_show_what_comes_out(name):
    module = importlib.import_module(name)
    examples = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert examples.attempted
    assert not examples.failed, "see the output"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_an_example(name):
    found = dict(needing_examples(importlib.import_module(name)))
    assert found
    assert not [name for name, value in found.items() if ">>>" not in (value.__doc__ or "")]
