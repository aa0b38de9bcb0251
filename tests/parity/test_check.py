"""Cases in other sizes hold, what differs is found, and what cannot be compared is said in a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity.case import CaseError, find_cases, load_case
from parity.check import check_case, table
from safetensors.torch import load_file, save_file

from tvr_lightning.errors import UserError

ROOT = Path(__file__).parents[2]


def holds(path):
    return all(comparison.holds for comparison in check_case(load_case(path)))


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
def test_further_cases_hold(restate, write_case, header, sizes):
    path = write_case(restate(header, **sizes), head=header)
    comparisons = check_case(load_case(path))
    assert {c.name for c in comparisons} == {
        "expected.similarity",
        "expected.loss",
        "feature.sentence",
        "feature.words",
        "feature.frames",
        "feature.temporal_frames",
    }
    assert comparisons[0].relative < 1e-5, comparisons[0]


def test_differences_below_the_tolerance_hold_and_others_do_not(parity_cases, write_case):
    tensors = load_file(parity_cases / "clip4clip_meanP.safetensors")
    for factor, expected in ((1 + 5e-5, True), (1 + 3e-4, False)):
        changed = {**tensors, "expected.similarity": tensors["expected.similarity"] * factor}
        assert holds(write_case(changed, head="meanP")) is expected


def test_a_wrong_weight_or_mask_is_found(parity_cases, write_case):
    tensors = load_file(parity_cases / "clip4clip_seqTransf.safetensors")
    for name in ("checkpoint.transformerClip.resblocks.0.ln_1.bias", "input.video", "checkpoint.clip.logit_scale"):
        changed = {**tensors, name: tensors[name] + 0.01}
        assert not holds(write_case(changed, head="seqTransf")), name
    mask = tensors["input.video_mask"].clone()
    mask[mask.sum(1) < mask.shape[1]] = 1
    assert not torch.equal(mask, tensors["input.video_mask"])
    assert not holds(write_case({**tensors, "input.video_mask": mask}, head="seqTransf"))


def test_the_table_shows_every_tensor_with_its_tolerance(parity_cases, write_case):
    tensors = load_file(parity_cases / "tcmgc_switches.safetensors")
    case = load_case(parity_cases / "tcmgc_switches.safetensors")
    lines = table(case, check_case(case)).splitlines()
    assert lines[0].endswith(f"tcmgc_switches, all {len(case.expected)} tensors hold")
    assert len(lines) == 2 + len(case.expected)
    assert [line.split()[-1] for line in lines if line.startswith("expected.parameter_count.")] == ["exact"] * 14
    wrong = {k: v + 1 if k.startswith("expected.sentence_frame.") else v for k, v in tensors.items()}
    changed = load_case(write_case({**wrong, "expected.x": torch.zeros(1)}, method="tcmgc_switches", **case.config))
    lines = table(changed, check_case(changed)).splitlines()
    count = sum(name.startswith("expected.sentence_frame.") for name in tensors)
    assert f"{count + 1} of {len(case.expected) + 1} tensors differ" in lines[0]
    assert sum(line.endswith("  differs") for line in lines) == count
    assert sum(line.endswith("  not computed") for line in lines) == 1


def test_a_header_that_the_checkpoint_lacks_is_named(restate, write_case):
    with pytest.raises(CaseError, match="config head is 'seqLSTM'; by its checkpoint's names the header is 'meanP'"):
        check_case(load_case(write_case(restate("meanP"), head="seqLSTM")))


def test_a_checkpoint_that_does_not_fit_is_named(restate, write_case):
    tensors = restate("meanP") | {"checkpoint.extra": torch.zeros(1)}
    with pytest.raises(UserError, match="1 unexpected: extra"):
        check_case(load_case(write_case(tensors)))


def test_folders_without_cases_are_named(tmp_path, write_case):
    with pytest.raises(CaseError, match=r"absent: no such folder"):
        find_cases(tmp_path / "absent")
    with pytest.raises(CaseError, match=r"contains no case; expected \*\.safetensors"):
        find_cases(tmp_path)
    deep = write_case({"expected.x": torch.zeros(1)}, name="a/b/deep")
    assert find_cases(tmp_path) == find_cases(deep) == [deep]


def run(folder):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "tests/parity", "--cases", str(folder)]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "COLUMNS": "500"}, capture_output=True, text=True, check=False
    )


def test_a_folder_is_one_test_per_case_and_a_bad_case_one_sentence(parity_cases, write_case, tmp_path):
    folder = tmp_path / "cases"
    good = load_file(parity_cases / "xpool.safetensors")
    write_case(good, "xpool", "cases/good")
    write_case(good | {"expected.similarity": good["expected.similarity"] + 1}, "xpool", "cases/sub/folder/wrong")
    write_case({"expected.x": torch.zeros(1)}, "somebody", "cases/sub/unknown")
    write_case({"input.x": torch.zeros(1)}, "xpool", "cases/sub/nothing")
    write_case({"expected.x": torch.zeros(1)}, "xpool", "cases/sub/inputless")
    save_file({"expected.x": torch.zeros(1)}, folder / "nameless.safetensors")
    (folder / "text.safetensors").write_text("no tensors")
    (folder / "notes.md").write_text("no case")
    output = run(folder).stdout
    assert "6 failed, 1 passed" in output
    assert "Traceback" not in output
    assert "PASSED tests/parity/test_cases.py::test_case[good]" in output
    assert "good.safetensors: xpool, all 2 tensors hold" in output
    for name, sentence in {
        "sub/folder/wrong": "wrong.safetensors: 1 of 2 tensors differ: expected.similarity",
        "sub/unknown": "unknown.safetensors: nothing computes cases of the method 'somebody'; known: clip4clip, ",
        "sub/nothing": "nothing.safetensors: no expected.* tensor, and no nothing.json beside it: nothing to compare",
        "sub/inputless": "inputless.safetensors: no tensor input.text_embedding; a xpool case needs it",
        "nameless": "nameless.safetensors: its metadata names no method; expected `method` and, as JSON, `config`",
        "text": "text.safetensors: not a safetensors file",
    }.items():
        assert any(
            line.startswith(f"FAILED tests/parity/test_cases.py::test_case[{name}] - ") and sentence in line
            for line in output.splitlines()
        ), output


def test_a_missing_folder_ends_with_a_sentence(tmp_path):
    done = run(tmp_path / "absent")
    assert done.returncode == 4
    assert done.stderr.strip() == f"ERROR: --cases {tmp_path / 'absent'}: no such folder"
