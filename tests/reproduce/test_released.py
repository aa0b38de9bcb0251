"""Released checkpoints compared with published results, with untrained stand-ins in the authors' layouts."""

from pathlib import Path

import pytest
import torch
from parity.case import load_case

from tvr_lightning.cli import main
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.reproduce.released import RELEASED, measure

VOCABULARY = 49408


@pytest.fixture(scope="module")
def stand_ins(parity_cases, tmp_path_factory) -> Path:
    """The authors' names and shapes of a tiny CLIP, with the rows that real captions need."""
    folder = tmp_path_factory.mktemp("released")
    generator = torch.Generator().manual_seed(0)
    for name, case in {"clip4clip": "clip4clip_seqTransf", "gare": "gare", "tcmgc": "tcmgc"}.items():
        checkpoint = dict(load_case(parity_cases / f"{case}.safetensors").checkpoint)
        width = checkpoint["clip.token_embedding.weight"].shape[1]
        checkpoint["clip.token_embedding.weight"] = 0.02 * torch.randn(VOCABULARY, width, generator=generator)
        torch.save(checkpoint, folder / f"{name}.bin")
    return folder


def test_a_difference_from_the_published_result_ends_with_status_1(stand_ins, root, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TVR_DATA", str(root))
    words = ["verify-released", str(stand_ins), "--num_workers", "0"]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "More than 0.3 R@1 from the published result: clip4clip, gare, tcmgc" in printed
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    cells = {(row[0], row[2]): row for row in rows[1:]}
    assert {name for name, direction in cells if direction == "t2v"} == set(RELEASED)
    assert cells["gare", "t2v"][1] == "gare, Table 1"
    for (name, _), (_, _, _, published, measured, difference, remark) in cells.items():
        if name in ("clip4clip", "gare", "tcmgc"):
            assert float(measured) - float(published) == pytest.approx(float(difference), abs=0.11)
            assert remark == f"{SYNTHETIC}; not audited"
        else:
            assert measured == "not measured"
            assert remark == "no checkpoint"
    method = measure("gare", stand_ins / "gare.bin", 0)
    assert method.evaluation is not None
    assert cells["gare", "t2v"][4] == f"{method.evaluation.text_to_video['R@1']:.1f}"
    (tmp_path / "gare.bin").symlink_to(stand_ins / "gare.bin")
    words = ["verify-released", str(tmp_path), "--num_workers", "0", "--tolerance", "100"]
    assert main(words) == 0
    capsys.readouterr()
    (tmp_path / "gare.bin").unlink()
    (tmp_path / "gare.bin").symlink_to(stand_ins / "tcmgc.bin")
    assert main(words) == 1
    assert "is a checkpoint of TC-MGC, not of" in capsys.readouterr().out


def test_missing_data_and_missing_checkpoints_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TVR_DATA", raising=False)
    assert main(["verify-released", str(tmp_path)]) == 1
    assert "Set TVR_DATA to their parent folder." in capsys.readouterr().err
    monkeypatch.setenv("TVR_DATA", str(tmp_path))
    assert main(["verify-released", str(tmp_path)]) == 1
    assert f"{tmp_path} contains no checkpoint. Expected the authors' files" in capsys.readouterr().err
