"""`tvr parity`: the authors' cases hold, further cases hold, and what differs is said and fails."""

import pytest
import torch
from safetensors.torch import load_file

from tvr_lightning.parity.case import load_case
from tvr_lightning.parity.report import check_case, run_parity

AUTHORS = [
    "clip4clip_meanP",
    "clip4clip_seqLSTM",
    "clip4clip_seqTransf",
    "clip4clip_tightTransf",
    "tcmgc",
    "tcmgc_lambda10",
    "tcmgc_switches",
    "tcmgc_switches_lambda_10",
    "metrics",
]


@pytest.mark.parametrize("name", AUTHORS)
def test_the_authors_cases_hold(parity_cases, name):
    comparisons = check_case(load_case(parity_cases / f"{name}.safetensors"))
    worst = comparisons[0]
    assert worst.relative < 1e-5, worst
    assert {c.name for c in comparisons} >= {
        key for key in load_file(parity_cases / f"{name}.safetensors") if key.startswith("expected.")
    }


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


def test_the_status_says_whether_all_cases_agree(parity_cases, write_case, capsys):
    good = parity_cases / "clip4clip_meanP.safetensors"
    tensors = load_file(good)
    tensors["expected.similarity"] = tensors["expected.similarity"] * (1 + 3e-4)
    wrong = write_case(tensors, head="meanP", name="wrong")
    assert run_parity([good]) == 0
    assert "1 of 1 cases agree" in capsys.readouterr().out
    assert run_parity([good, wrong]) == 1
    output = capsys.readouterr().out
    assert "differs" in output
    assert f"1 of 2 cases differ by more than 0.0001 (relative) or cannot be compared: {wrong}" in output


def test_differences_below_the_tolerance_pass(parity_cases, write_case):
    tensors = load_file(parity_cases / "clip4clip_meanP.safetensors")
    tensors["expected.similarity"] = tensors["expected.similarity"] * (1 + 5e-5)
    assert run_parity([write_case(tensors, head="meanP")]) == 0


def test_a_wrong_weight_or_mask_is_found(parity_cases, write_case):
    tensors = load_file(parity_cases / "clip4clip_seqTransf.safetensors")
    for name in ("checkpoint.transformerClip.resblocks.0.ln_1.bias", "input.video", "checkpoint.clip.logit_scale"):
        changed = {**tensors, name: tensors[name] + 0.01}
        assert run_parity([write_case(changed, head="seqTransf")]) == 1, name
    mask = tensors["input.video_mask"].clone()
    mask[mask.sum(1) < mask.shape[1]] = 1
    assert not torch.equal(mask, tensors["input.video_mask"])
    assert run_parity([write_case({**tensors, "input.video_mask": mask}, head="seqTransf")]) == 1


def test_a_tensor_that_nothing_computes_fails(parity_cases, write_case, capsys):
    tensors = load_file(parity_cases / "clip4clip_meanP.safetensors")
    tensors["expected.loss.kl"] = torch.zeros(1)
    assert run_parity([write_case(tensors, head="meanP")]) == 1
    assert "not computed" in capsys.readouterr().out


def test_every_failing_tensor_is_shown(parity_cases, write_case, capsys):
    tensors = load_file(parity_cases / "tcmgc_switches.safetensors")
    path = parity_cases / "tcmgc_switches.safetensors"
    changed = {k: v + 1 if k.startswith("expected.sentence_frame.") else v for k, v in tensors.items()}
    assert run_parity([write_case(changed, method="tcmgc_switches", **load_case(path).config)], rows=1) == 1
    output = capsys.readouterr().out
    assert output.count("differs") == sum(k.startswith("expected.sentence_frame.") for k in tensors)
    assert run_parity([path], rows=1) == 0
    assert f"{sum(k.startswith('expected.') for k in tensors) - 1} more with smaller differences" in (
        capsys.readouterr().out
    )


def test_unusable_files_are_named_and_the_others_still_run(parity_cases, write_case, tmp_path, capsys):
    (tmp_path / "text.safetensors").write_text("no tensors")
    unknown = write_case({"expected.x": torch.zeros(1)}, method="somebody", name="unknown")
    files = [tmp_path / "text.safetensors", tmp_path / "absent.safetensors", unknown]
    assert run_parity([*files, parity_cases / "clip4clip_meanP.safetensors"]) == 1
    output = capsys.readouterr().out
    assert "text.safetensors: not a safetensors file" in output
    assert "absent.safetensors: no such file" in output
    assert "nothing implements the method 'somebody'; known: clip4clip" in output
    assert "clip4clip_meanP.safetensors: clip4clip, 4 tensors" in output
    assert "3 of 4 cases" in output
