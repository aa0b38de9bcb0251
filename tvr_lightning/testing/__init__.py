"""Tests that every method must pass, to be inherited by the tests of a method; the recipe determines the method.

    from pathlib import Path
    from tvr_lightning.testing import MethodTestSuite

    class TestMine(MethodTestSuite):
        recipe = Path(__file__).parent / "mine.yaml"

The method is built with the options of its recipe, a small version of its encoder (`Encoder.small`), random weights and
a synthetic dataset. The tests that need several processes run only with `-m slow`. Register the marker `slow` in your
pytest configuration.
"""

from tvr_lightning.testing.contract import MethodTestSuite
from tvr_lightning.testing.processes import run_processes
from tvr_lightning.testing.small import method_recipes, random_pairs, small

__all__ = ["MethodTestSuite", "method_recipes", "random_pairs", "run_processes", "small"]
