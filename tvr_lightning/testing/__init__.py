"""What every method must keep, as tests to inherit; what there is to test is found by the method's recipe alone.

    from pathlib import Path
    from tvr_lightning.testing import MethodTestSuite

    class TestMine(MethodTestSuite):
        recipe = Path(__file__).parent / "mine.yaml"

The recipe is built small, on a tiny encoder with random weights and a synthetic dataset. `pytest -m "not slow"` leaves
out what takes several processes; register the marker `slow` where markers are strict.
"""

from tvr_lightning.testing.contract import MethodTestSuite
from tvr_lightning.testing.processes import run_processes
from tvr_lightning.testing.small import method_recipes, random_pairs, small

__all__ = ["MethodTestSuite", "method_recipes", "random_pairs", "run_processes", "small"]
