"""Authors' checkpoints: reading, recognising, renaming, and what their errors say."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tvr_lightning.authors.families import FAMILIES, fitting_keep_rate
from tvr_lightning.authors.importer import family_of, import_checkpoint, similarity_header
from tvr_lightning.authors.names import replace_prefix
from tvr_lightning.encoders.weights import read_tensors
from tvr_lightning.errors import UserError
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods.clip4clip import TightTransf

HEADERS = {"meanP": MeanP(), "seqLSTM": SeqLSTM(1), "seqTransf": SeqTransf(1), "tightTransf": TightTransf(1)}


def authors_tensors(parity_cases, name):
    tensors = load_file(parity_cases / f"{name}.safetensors")
    return {key.removeprefix("checkpoint."): t for key, t in tensors.items() if key.startswith("checkpoint.")}


class Anything:
    """Something that only unpickling could bring back."""


def test_files_of_both_kinds_and_wrapped_ones_read_alike(parity_cases, tmp_path):
    tensors = authors_tensors(parity_cases, "clip4clip_seqLSTM")
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin.4")
    torch.save({"state_dict": wrapped, "epoch": 4}, tmp_path / "model.pth")
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("pytorch_model.bin.4", "model.pth", "model.safetensors"):
        found = read_tensors(tmp_path / name)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_what_is_no_file_of_tensors_is_refused_unread(tmp_path):
    torch.save({"weight": Anything()}, tmp_path / "object.pt")
    with pytest.raises(UserError, match=r"object.pt cannot be read as weights .*never executed"):
        read_tensors(tmp_path / "object.pt")
    (tmp_path / "text.bin").write_text("hello")
    with pytest.raises(UserError, match=r"text.bin cannot be read"):
        read_tensors(tmp_path / "text.bin")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(UserError, match=r"text\.safetensors cannot be read as weights"):
        read_tensors(tmp_path / "text.safetensors")
    torch.save({"a": torch.zeros(1), "args": 3}, tmp_path / "mixed.pt")
    with pytest.raises(UserError, match="not tensors: args"):
        read_tensors(tmp_path / "mixed.pt")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    with pytest.raises(UserError, match="contains a list, not a state dict"):
        read_tensors(tmp_path / "list.pt")
    with pytest.raises(UserError, match="no such file"):
        read_tensors(tmp_path / "absent.bin")


@pytest.mark.parametrize("header", HEADERS)
def test_every_tensor_of_the_authors_arrives_under_our_name(parity_cases, header):
    tensors = authors_tensors(parity_cases, f"clip4clip_{header}")
    assert similarity_header(tensors) == HEADERS[header]
    state = import_checkpoint(tensors, "file", words=12, frames=6).state_dict()
    rules = family_of(tensors, "file").rules
    taken = {name: ours for name in tensors if (ours := replace_prefix(name, rules)) in state}
    assert sorted(taken.values()) == sorted(state)
    assert tensors.keys() - taken <= {"frame_position_embeddings.weight"}
    for theirs, ours in taken.items():
        assert torch.equal(state[ours].flatten(), tensors[theirs].flatten()), theirs


def test_half_precision_checkpoints_become_float32(parity_cases):
    tensors = {name: t.half() for name, t in authors_tensors(parity_cases, "clip4clip_meanP").items()}
    state = import_checkpoint(tensors, "file", words=12, frames=6).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["encoder.clip.text_projection"], tensors["clip.text_projection"].float())


def test_methods_are_recognised_by_their_names(parity_cases):
    for path in sorted(parity_cases.glob("*.safetensors")):
        names = [n.removeprefix("checkpoint.") for n in load_file(path) if n.startswith("checkpoint.")]
        with safe_open(path, "pt") as file:
            method = file.metadata()["method"]
        if method in {family.name for family in FAMILIES}:
            assert family_of(names, "file").name == method, path.name


def test_another_methods_checkpoint_is_named(parity_cases):
    tcmgc, clip4clip = (authors_tensors(parity_cases, n) for n in ("tcmgc", "clip4clip_meanP"))
    with pytest.raises(UserError, match=r"file is a checkpoint of TC-MGC, not of CLIP4Clip.*--method tcmgc"):
        import_checkpoint(tcmgc, "file", method="clip4clip")
    with pytest.raises(UserError, match=r"file is a checkpoint of CLIP4Clip, not of TC-MGC"):
        import_checkpoint(clip4clip, "file", method="tcmgc")
    with pytest.raises(UserError, match=r"is a checkpoint of GARE"):
        family_of(["clip.logit_scale", "psi.mean_proj.bias", "weight_fc.0.bias"], "file", "clip4clip")
    with pytest.raises(UserError, match=r"no known method has these tensors: bert.weight"):
        family_of(["bert.weight"], "file", "clip4clip")


def test_unexpected_missing_and_misshapen_tensors_are_listed(parity_cases):
    tensors = authors_tensors(parity_cases, "clip4clip_tightTransf")
    del tensors["cross.pooler.dense.bias"], tensors["similarity_dense.weight"]
    tensors["cross.embeddings.token_type_embeddings.weight"] = torch.zeros(2, 64)
    with pytest.raises(UserError) as caught:
        import_checkpoint(tensors, "pytorch_model.bin.3", words=12, frames=6)
    message = str(caught.value)
    assert message.startswith("pytorch_model.bin.3 does not fit")
    assert "1 unexpected: cross.embeddings.token_type_embeddings.weight" in message
    assert "2 missing: cross.pooler.dense.bias (64,), similarity_dense.weight (1, 64)" in message
    tensors = authors_tensors(parity_cases, "clip4clip_seqTransf")
    tensors["transformerClip.resblocks.0.ln_1.bias"] = torch.zeros(32)
    with pytest.raises(
        UserError, match=r"1 of another shape: transformerClip\S+ln_1.bias: expected \(64,\), found \(32,\)"
    ):
        import_checkpoint(tensors, "file", words=12, frames=6)
    tensors["frame_position"] = tensors.pop("frame_position_embeddings.weight")
    with pytest.raises(UserError, match=r"1 missing: frame_position_em.*; 1 unexpected: frame_position .*; 1 of"):
        import_checkpoint(tensors, "file", words=12, frames=6)
    del tensors["clip.ln_final.bias"]
    with pytest.raises(UserError, match=r"missing: clip.ln_final.bias .*, frame_position_em"):
        import_checkpoint(tensors, "file", words=12, frames=6)


def test_words_and_frames_beyond_the_positions_are_refused(parity_cases):
    tensors = authors_tensors(parity_cases, "clip4clip_tightTransf")
    assert import_checkpoint(tensors, "file", words=40, frames=39).frames == 39
    with pytest.raises(UserError, match="positions for 40 words and 39 frames"):
        import_checkpoint(tensors, "file", words=12, frames=40)
    with pytest.raises(UserError, match="41 words and 6 frames do not fit; the checkpoint has positions for 40 words"):
        import_checkpoint(authors_tensors(parity_cases, "clip4clip_meanP"), "file", words=41, frames=6)


def test_words_and_keep_rates_that_the_matrices_do_not_fit_are_told_what_fits(parity_cases):
    tensors = authors_tensors(parity_cases, "tcmgc")  # its matrices keep 3
    assert import_checkpoint(tensors, "file", words=12, frames=6).options.keep_rate == 0.3
    assert import_checkpoint(tensors, "file", words=32, frames=6).options.keep_rate == 0.1
    with pytest.raises(UserError, match="keep 3 words, so they do not fit 2 words; 3 or more words fit"):
        import_checkpoint(tensors, "file", words=2, frames=6)
    with pytest.raises(UserError, match=r"file: keep_rate 1.0 keeps all 3 slots, .* nothing to fuse"):
        import_checkpoint(tensors, "file", words=3, frames=6)
    with pytest.raises(UserError, match="attentive_word_logit_weight is missing"):
        import_checkpoint({n: t for n, t in tensors.items() if n != "attentive_word_logit_weight"}, "file", words=12)


@pytest.mark.parametrize("words", [3, 12, 32, 49, 64, 77])
def test_a_fitting_keep_rate_keeps_what_it_should(words):
    for kept in range(1, words + 1):
        assert int(words * fitting_keep_rate(kept, words)) == kept
    with pytest.raises(ValueError, match="or more words fit"):
        fitting_keep_rate(words + 1, words)
