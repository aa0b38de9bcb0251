"""Released checkpoints compared with published results, with untrained stand-ins in the authors' layouts."""

from functools import cache

import pytest
import torch
from parity.case import load_case

from tvr_lightning.cli import main
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.reproduce import released


def test_a_difference_from_the_published_result_ends_with_status_1(parity_cases, root, tmp_path, monkeypatch, capsys):
    generator = torch.Generator().manual_seed(0)
    for name, case in {"clip4clip": "clip4clip_seqTransf", "gare": "gare", "xpool": "tcmgc"}.items():
        checkpoint = dict(load_case(parity_cases / f"{case}.safetensors").checkpoint)
        width = checkpoint["clip.token_embedding.weight"].shape[1]
        # With the rows that real captions need.
        checkpoint["clip.token_embedding.weight"] = 0.02 * torch.randn(49408, width, generator=generator)
        torch.save(checkpoint, tmp_path / f"{name}.bin")
    monkeypatch.setenv("TVR_DATA", str(root))
    monkeypatch.setattr(released, "measure", cache(released.measure))

    def verify(*options):
        status = main(["verify-released", str(tmp_path), "--num_workers=0", *options])
        return status, capsys.readouterr().out

    status, printed = verify()
    assert status == 1
    assert "More than 0.3 R@1 from the published result: clip4clip, gare" in printed
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    cells = {(row[0], row[2]): row for row in rows[2:]}
    assert {name for name, direction in cells if direction == "t2v"} == set(released.RELEASED)
    # GARE, Table 1
    published = {("clip4clip", "t2v"): 44.5, ("clip4clip", "v2t"): 42.7, ("gare", "t2v"): 49.1, ("gare", "v2t"): 48.6}
    assert {key: float(cells[key][3]) for key in published} == published
    assert len(rows) == 2 + len(cells)
    assert cells["gare", "t2v"][1] == "gare, Table 1"
    for (name, direction), (*_, expected, measured, difference, remark) in cells.items():
        if name in ("clip4clip", "gare"):
            evaluation = released.measure(name, tmp_path / f"{name}.bin", 0).evaluation
            metrics = {"t2v": evaluation.text_to_video, "v2t": evaluation.video_to_text}[direction]
            assert measured == f"{metrics['R@1']:.1f}"
            assert float(measured) - float(expected) == pytest.approx(float(difference), abs=0.11)
            assert remark == f"{SYNTHETIC}; not audited"
        else:
            assert measured == "not measured"
            assert remark == "no checkpoint" or "is a checkpoint of TC-MGC, not of" in remark
    assert verify("--tolerance=100")[0] == 1  # because of xpool.bin
    (tmp_path / "xpool.bin").unlink()
    assert verify("--tolerance=100")[0] == 0
    (tmp_path / "gare.bin").unlink()
    assert verify()[0] == 1, "one result that differs is enough"


def test_missing_data_and_missing_checkpoints_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TVR_DATA", raising=False)
    assert main(["verify-released", str(tmp_path)]) == 2
    assert "Set TVR_DATA to their parent folder." in capsys.readouterr().err
    monkeypatch.setenv("TVR_DATA", str(tmp_path))
    assert main(["verify-released", str(tmp_path)]) == 2
    assert f"{tmp_path} contains no checkpoint. Expected the authors' files" in capsys.readouterr().err
