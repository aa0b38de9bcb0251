"""The comparison itself, and CLIP4Clip in other sizes than those of the authors' cases."""

import os
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import pytest
import torch
from parity import test_cases
from parity.case import CaseError, load_case
from parity.check import check_case, compare_tensor
from parity.restated import Sizes, restated_case
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize(
    ("header", "sizes"),
    [
        ("meanP", {"texts": 6, "videos": 3, "dimension": 64, "vision": 128, "patch": 6, "seed": 1}),
        ("seqTransf", {"frames": 4, "words": 9, "text_layers": 1}),
        ("seqTransf", {"temporal_layers": 1, "dimension": 64, "videos": 2, "seed": 3}),
        ("seqLSTM", {"temporal_layers": 2, "frames": 5, "dimension": 64}),
        ("tightTransf", {"frames": 5, "seed": 4}),
        ("tightTransf", {"temporal_layers": 1, "texts": 2, "dimension": 64}),
    ],
)
def test_clip4clip_of_other_sizes_equals_the_restatement(write_case, header, sizes):
    comparisons = check_case(load_case(write_case(restated_case(Sizes(**sizes), header))))
    features = {"feature.sentence", "feature.words", "feature.frames", "feature.temporal_frames"}
    assert {c.name for c in comparisons} == {"expected.similarity", "expected.loss"} | features
    assert comparisons[0].relative < 1e-5, comparisons[0]


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


@pytest.mark.parametrize(
    ("tensor", "metadata", "message"),
    [
        ("expected.x", {"method": "any"}, "nothing computes cases of 'any'; known: clip4clip"),
        ("input.x", {"method": "xpool"}, "no case.json: nothing to compare"),
        ("expected.x", {"method": "xpool"}, "a xpool case needs 'text_embedding'"),
        ("expected.x", {"method": "ncl"}, "a ncl case needs '"),
        ("expected.x", {}, "not a safetensors file with `method`"),
        ("expected.x", {"method": "xpool", "config": "no JSON"}, "JSON `config` .Expecting value"),
    ],
)
def test_unusable_cases_are_refused(tmp_path, tensor, metadata, message):
    save_file({tensor: torch.zeros(1)}, tmp_path / "case.safetensors", metadata)
    with pytest.raises(CaseError, match=message):
        check_case(load_case(tmp_path / "case.safetensors"))


def test_wrong_and_missing_results_fail(write_case, request):
    made = restated_case(Sizes(), "meanP")
    path = write_case(made | {"expected.similarity": made["expected.similarity"] + 1, "expected.other": torch.ones(1)})
    with pytest.raises(pytest.fail.Exception, match=r"2 of 7 tensors differ: expected\.other, expected\.similarity"):
        test_cases.test_case(path, request)


@pytest.mark.slow
def test_every_case_of_a_folder_is_a_test(parity_cases, write_case, tmp_path):
    good = load_file(parity_cases / "xpool.safetensors")
    (tmp_path / "cases" / "sub").mkdir(parents=True)
    write_case(good, "xpool", "cases/good")
    write_case(good | {"expected.similarity": good["expected.similarity"] + 1}, "xpool", "cases/sub/wrong")
    (tmp_path / "cases" / "notes.md").write_text("no case")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "tests/parity", "--cases"]
    options = {"cwd": Path(__file__).parents[2], "env": {**os.environ, "COLUMNS": "500"}}
    done = subprocess.run([*command, tmp_path / "cases"], **options, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout
    assert "PASSED tests/parity/test_cases.py::test_case[good]" in done.stdout
    assert "good.safetensors: xpool, all 2 tensors hold" in done.stdout
    assert "FAILED tests/parity/test_cases.py::test_case[sub/wrong] - " in done.stdout
