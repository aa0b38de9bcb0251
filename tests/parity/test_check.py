"""The comparison itself: CLIP4Clip in other sizes, differences, tables, and unusable cases."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity import test_cases
from parity.case import CaseError, ParityCase, load_case
from parity.check import check_case, compare, compare_tensor, table
from parity.restated import Sizes, restated_case
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("header", "sizes"),
    [
        ("meanP", {}),
        ("meanP", {"texts": 6, "videos": 3, "dimension": 64, "vision": 128, "patch": 6, "seed": 1}),
        ("seqTransf", {"frames": 4, "words": 9, "text_layers": 1}),
        ("seqTransf", {"temporal_layers": 1, "dimension": 64, "videos": 2, "seed": 3}),
        ("seqLSTM", {"temporal_layers": 2, "frames": 5, "dimension": 64}),
        ("tightTransf", {"frames": 5, "seed": 4}),
        ("tightTransf", {"temporal_layers": 1, "texts": 2, "dimension": 64}),
    ],
)
def test_clip4clip_of_other_sizes_equals_the_restatement(write_case, header, sizes):
    comparisons = check_case(load_case(write_case(restated_case(Sizes(**sizes), header), head=header)))
    features = {"feature.sentence", "feature.words", "feature.frames", "feature.temporal_frames"}
    assert {c.name for c in comparisons} == {"expected.similarity", "expected.loss"} | features
    assert comparisons[0].relative < 1e-5, comparisons[0]


@pytest.mark.parametrize(
    ("expected", "ours", "relative"),
    [
        ([1000.0, 0.001], [1000.0, 0.051], 5e-5),  # of the largest value
        ([1e-2], [1.001e-2], 1e-3),
        ([0.0] * 3, [1e-7] * 3, 8.4e-5),  # rounding noise
        ([0.0] * 3, [1e-6] * 3, 8.4e-4),
        ([1.0, -math.inf, math.nan], [1.0, -math.inf, math.nan], 0.0),
        ([1.0, -math.inf, math.nan], [1.0, math.inf, math.nan], math.inf),
        ([1.0, -math.inf, math.nan], [1.0, 0.0, math.nan], math.inf),
        ([1.0, -math.inf, math.nan], [1.0, -math.inf, 0.5], math.inf),
        ([1.0, -math.inf, math.nan], [math.nan, -math.inf, math.nan], math.inf),
        ([-math.inf], [-math.inf], 0.0),
        ([], [], 0.0),
        ([10_000_000, 3], [10_000_000, 3], 0.0),
        ([10_000_000, 3], [10_000_001, 3], math.inf),
    ],
)
def test_a_difference_is_relative_to_the_largest_value(expected, ours, relative):
    found = compare_tensor("any", torch.tensor(expected), torch.tensor(ours))
    assert found.relative == pytest.approx(relative, rel=1e-2)
    assert found.holds == (relative < 1e-4)


def test_rounding_noise_of_float64_is_smaller():
    zero = torch.zeros(3, dtype=torch.float64)
    assert compare_tensor("any", zero, zero + 1e-16).holds
    assert not compare_tensor("any", zero, zero + 1e-13).holds


def test_comparisons_are_sorted_by_difference_and_name_wrong_shapes(tmp_path):
    case = ParityCase(tmp_path / "x", "any", expected={"a": torch.ones(2), "b": torch.ones(2, 3), "c": torch.ones(1)})
    case.features["f"] = torch.ones(2)
    found = compare(case, {"a": torch.ones(2), "b": torch.ones(3, 2), "c": torch.ones(()), "feature.f": torch.zeros(2)})
    assert [c.name for c in found] == ["expected.b", "feature.f", "expected.a", "expected.c"]
    assert [c.holds for c in found] == [False, False, True, True]
    assert found[0].note == "ours has shape (3, 2)"
    assert [c.note for c in compare(case, {}) if not c.holds] == ["not computed"] * 3


def test_the_table_shows_every_tensor_with_its_tolerance(parity_cases):
    case = load_case(parity_cases / "tcmgc_switches.safetensors")
    changed = [name for name in case.expected if name.startswith("sentence_frame.")]
    case.expected |= {name: case.expected[name] + 1 for name in changed} | {"x": torch.zeros(1)}
    lines = table(case, check_case(case)).splitlines()
    assert f"{len(changed) + 1} of {len(case.expected)} tensors differ" in lines[0]
    assert len(lines) == 1 + len(case.expected)
    assert [line.split()[-1] for line in lines if line.startswith("expected.parameter_count.")] == ["exact"] * 14
    assert sum(line.endswith("  differs") for line in lines) == len(changed)
    assert sum(line.endswith("  not computed") for line in lines) == 1


@pytest.mark.parametrize(
    ("tensor", "metadata", "message"),
    [
        ("expected.x", {"method": "any"}, "nothing computes cases of the method 'any'; known: clip4cl"),
        ("input.x", {"method": "xpool"}, r"no expected\.\* tensor, and no case.json beside it: nothing to comp"),
        ("expected.x", {"method": "xpool"}, r"no tensor input\.text_embedding; a xpool case needs it"),
        ("expected.x", {}, "its metadata names no method; expected `method` and, as JSON, `config`"),
        ("expected.x", {"method": "xpool", "config": "no JSON"}, "a config in JSON .Expecting value"),
    ],
)
def test_unusable_cases_fail_with_one_sentence(tmp_path, request, tensor, metadata, message):
    save_file({tensor: torch.zeros(1)}, tmp_path / "case.safetensors", metadata)
    with pytest.raises(pytest.fail.Exception, match=message):
        test_cases.test_case(tmp_path / "case.safetensors", request)


@pytest.mark.parametrize(
    ("changed", "config", "message"),
    [
        ("checkpoint.extra", {}, "1 unexpected: extra"),
        ("expected.similarity", {}, "1 of 6 tensors differ: expected.similarity"),
        ("x", {"head": "seqLSTM"}, "config head is 'seqLSTM'; by its checkpoint's names the header is 'meanP'"),
    ],
)
def test_different_cases_fail_with_one_sentence(write_case, request, changed, config, message):
    made = restated_case(Sizes(), "meanP")
    path = write_case(made | {changed: made.get(changed, torch.zeros(1)) + 1}, **config)
    with pytest.raises(pytest.fail.Exception, match=message):
        test_cases.test_case(path, request)


def test_a_missing_option_of_a_case_is_named(parity_cases, write_case):
    case = load_case(write_case(load_file(parity_cases / "ncl.safetensors"), "ncl"))
    with pytest.raises(CaseError, match="its config or its checkpoint has no '"):
        check_case(case)


@pytest.mark.slow
def test_every_case_of_a_folder_is_a_test(parity_cases, write_case, tmp_path):
    def run(folder):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "tests/parity", "--cases", folder]
        environment = {**os.environ, "COLUMNS": "500"}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    good = load_file(parity_cases / "xpool.safetensors")
    (tmp_path / "cases" / "sub").mkdir(parents=True)
    write_case(good, "xpool", "cases/good")
    write_case(good | {"expected.similarity": good["expected.similarity"] + 1}, "xpool", "cases/sub/wrong")
    (tmp_path / "cases" / "notes.md").write_text("no case")
    output = run(tmp_path / "cases").stdout
    assert "1 failed, 1 passed" in output
    assert "Traceback" not in output
    assert "PASSED tests/parity/test_cases.py::test_case[good]" in output
    assert "good.safetensors: xpool, all 2 tensors hold" in output
    assert "FAILED tests/parity/test_cases.py::test_case[sub/wrong] - " in output
    done = run(tmp_path / "absent")
    assert done.returncode == 4
    assert done.stderr.strip() == f"ERROR: --cases {tmp_path / 'absent'}: no such folder"
