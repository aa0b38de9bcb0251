"""The comparison itself."""

import os
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import pytest
import torch
from parity import test_cases
from parity.check import compare_tensor
from safetensors.torch import load_file, save_file

ZERO = torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("expected", "ours", "relative"),
    [
        ([1000.0, 0.001], [1000.0, 0.051], 5e-5),  # of the largest value
        ([1e-2], [1.001e-2], 1e-3),
        ([0.0] * 3, [1e-7] * 3, 8.4e-5),  # rounding noise
        ([0.0] * 3, [1e-6] * 3, 8.4e-4),
        (ZERO, ZERO + 1e-16, 1e-6),
        (ZERO, ZERO + 1e-13, 1e-3),
        ([1.0, -inf, nan], [1.0, -inf, nan], 0.0),
        ([1.0, -inf, nan], [1.0, inf, nan], inf),
        ([1.0, -inf, nan], [1.0, -inf, 0.5], inf),
        ([1.0, -inf, nan], [nan, -inf, nan], inf),
        ([], [], 0.0),
        ([10_000_000, 3], [10_000_000, 3], 0.0),
        ([10_000_000, 3], [10_000_001, 3], inf),
        ([1.0], 1.0, 0.0),
        ([1.0, 1.0], [[1.0], [1.0]], inf),
    ],
)
def test_a_difference_is_relative_to_the_largest_value(expected, ours, relative):
    found = compare_tensor("any", torch.as_tensor(expected), torch.as_tensor(ours))
    assert found.relative == pytest.approx(relative, rel=1e-2)
    assert found.holds == (relative < 1e-4)


@pytest.fixture
def write_case(parity_cases, tmp_path):
    """Write X-Pool's recorded case with changed tensors and return its path."""
    recorded = load_file(parity_cases / "xpool.safetensors")

    def write(name, shift=0.0, **others):
        path = tmp_path / f"{name}.safetensors"
        tensors = recorded | {"expected.similarity": recorded["expected.similarity"] + shift} | others
        save_file(tensors, path, {"method": "xpool"})
        return path

    return write


def test_wrong_and_missing_results_fail(write_case, request):
    path = write_case("case", shift=1.0, **{"expected.other": torch.ones(1)})
    with pytest.raises(pytest.fail.Exception, match=r"2 of 3 tensors differ: expected\.other, expected\.similarity"):
        test_cases.test_case(path, request)


@pytest.mark.slow
def test_every_case_of_a_folder_is_a_test(write_case, tmp_path):
    (tmp_path / "cases" / "sub").mkdir(parents=True)
    write_case("cases/good")
    write_case("cases/sub/wrong", shift=1.0)
    (tmp_path / "cases" / "notes.md").write_text("no case")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "tests/parity", "--cases"]
    options = {"cwd": Path(__file__).parents[2], "env": {**os.environ, "COLUMNS": "500"}}
    done = subprocess.run([*command, tmp_path / "cases"], **options, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout
    assert "PASSED tests/parity/test_cases.py::test_case[good]" in done.stdout
    assert "good.safetensors: xpool, all 2 tensors hold" in done.stdout
    assert "FAILED tests/parity/test_cases.py::test_case[sub/wrong] - " in done.stdout
