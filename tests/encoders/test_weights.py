from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from tvr_lightning.encoders.weights import load_weights, read_state_dict


@pytest.fixture(scope="module")
def model():
    return open_clip.CLIP(**open_clip.get_model_config("tvr-test"))


@pytest.fixture(scope="module")
def tensors(model):
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def test_every_layout_reads_to_the_same_tensors(tensors, tmp_path):
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "b.pt")
    torch.save(
        {"epoch": 3, "name": "run", "state_dict": {f"module.{k}": v for k, v in tensors.items()}}, tmp_path / "c.pt"
    )
    for name in ("a.safetensors", "b.pt", "c.pt"):
        found, openai = read_state_dict(tmp_path / name)
        assert not openai
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_half_matrices_beside_float_norms_are_openais(tensors, tmp_path):
    mixed = {name: tensor if "ln_" in name else tensor.half() for name, tensor in tensors.items()}
    torch.save(mixed, tmp_path / "mixed.pt")
    assert read_state_dict(tmp_path / "mixed.pt")[1]


def test_facts_of_openais_archives_are_no_weights(tensors, tmp_path):
    torch.save({**tensors, "vocab_size": torch.tensor(49408)}, tmp_path / "facts.pt")
    found, openai = read_state_dict(tmp_path / "facts.pt")
    assert openai
    assert found.keys() == tensors.keys()


class Trap:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    torch.save({"state_dict": Trap(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt cannot be read as weights"):
        read_state_dict(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_damaged_and_foreign_files_are_named(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 cut short")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    for name in ("cut.safetensors", "cut.pt"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as weights"):
            read_state_dict(tmp_path / name)
    with pytest.raises(ValueError, match=r"list\.pt contains a list"):
        read_state_dict(tmp_path / "list.pt")


def test_misfits_are_listed_with_expected_and_found(model, tensors):
    wrong = {name: tensor for name, tensor in tensors.items() if name != "ln_final.weight"}
    wrong["head.weight"] = torch.ones(2, 3)
    wrong["visual.proj"] = torch.ones(64, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"file.pt does not fit") as error:
        load_weights(model, wrong, "file.pt")
    text = str(error.value)
    assert "1 missing: ln_final.weight (64,)" in text
    assert "1 unexpected: head.weight (2, 3)" in text
    assert "1 of another shape: visual.proj: expected (64, 64), found (64, 32)" in text
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_openai_names_load_into_a_model_with_a_text_module(tensors):
    custom = open_clip.CustomTextCLIP(
        **{k: v for k, v in open_clip.get_model_config("tvr-test-custom").items() if k != "custom_text"}
    )
    load_weights(custom, {**tensors, "logit_scale": tensors["logit_scale"].reshape(1)}, "file.pt")
    assert torch.equal(custom.text.ln_final.weight, tensors["ln_final.weight"])
    assert torch.equal(custom.visual.proj, tensors["visual.proj"])
    assert torch.equal(custom.logit_scale, tensors["logit_scale"])
