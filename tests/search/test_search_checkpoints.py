"""Checkpoints for `tvr index`: methods of other packages, untrusted class names, and no network."""

import json
import shutil
from dataclasses import replace

import open_clip
import pytest
import torch
from examples.dual_softmax_loss import DualSoftmaxLoss
from open_clip import pretrained
from search_parts import TINY, find, save_checkpoint

from tvr_lightning.cli import main
from tvr_lightning.encoders import ClipEncoder, TinyClipEncoder
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import weights_follow
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import Scorer, ScorerSource
from tvr_lightning.training.checkpoints import CheckpointError

ARGUMENTS = {"words": 12, "frames": 4}
REMOVED = object()


def changed(source, path, **arguments):
    """Write the checkpoint with other hyperparameters."""
    saved = torch.load(source, weights_only=True)
    saved["hyper_parameters"] |= arguments
    torch.save(saved, path)
    return path


def test_a_method_outside_the_package_is_used_if_the_user_trusts_it(gallery, tmp_path, capsys):
    """The method of a separate project in docs/adding-a-method.md."""
    method = DualSoftmaxLoss(TinyClipEncoder(**TINY), **ARGUMENTS)
    outside, path = save_checkpoint(method, TINY, ARGUMENTS, tmp_path / "a.ckpt"), "examples.dual_softmax_loss"
    changed(outside, outside, _class_path=f"{path}.DualSoftmaxLoss", prior_temperature=500.0)
    out = str(tmp_path / "index")
    command = ["index", str(gallery), "--out", out, "--ckpt_path", str(outside)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "--trust examples.dual_softmax_loss" in error
    trust = ["--trust", "somewhere.else", "--trust", path]
    assert main([*command, *trust]) == 0
    for more, status in (([], 2), (trust, 0)):
        assert main(["search", "a red square", "--index", out, *more]) == status
        assert main(["index", "--out", out, *more]) == status
    with Searcher(out, trust=["examples"]) as searcher:
        (scorer,) = searcher.scorers.values()
        assert isinstance(scorer.module, DualSoftmaxLoss)
        assert scorer.module.prior_temperature == 500.0
    changed(outside, outside, _class_path="nowhere.Method")
    error = r"names nowhere\.Method, which cannot be found: No module named 'nowhere'"
    with pytest.raises(CheckpointError, match=error):
        Scorer(ScorerSource(str(outside)), trust=["nowhere"])


@pytest.fixture
def published(tmp_path, monkeypatch):
    """An architecture of open_clip whose weights must be downloaded."""
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
    vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
    (tmp_path / "ViT-test.json").write_text(json.dumps({"embed_dim": 64, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(tmp_path / "ViT-test.json")
    tag = pretrained._pcfg(url="https://example.invalid/weights.pt", mean=(0.1, 0.2, 0.3), quick_gelu=True)
    monkeypatch.setitem(pretrained._PRETRAINED, "ViT-test", {"published": tag})
    return {"architecture": "ViT-test", "weights": "published"}


def test_weights_come_from_the_checkpoint_without_a_download(published, tmp_path, no_network, caplog):
    torch.manual_seed(0)
    with weights_follow():
        method = CLIP4Clip(ClipEncoder(**published), **ARGUMENTS)
    path = save_checkpoint(method, {}, ARGUMENTS, tmp_path / "a.ckpt")
    encoder = {"class_path": "tvr_lightning.encoders.ClipEncoder", "init_args": published}
    scorer = Scorer(ScorerSource(str(changed(path, path, encoder=encoder))))
    assert no_network == []
    assert "RANDOM" not in caplog.text
    for name, tensor in method.state_dict().items():
        assert torch.equal(scorer.module.state_dict()[name], tensor), name
    assert scorer.module.encoder.configuration() == method.encoder.configuration()
    with pytest.raises(MissingWeightsError, match="no weights 'published'"):
        ClipEncoder(**published)
    assert no_network, "a recipe may download them"


def test_an_index_can_be_searched_from_any_working_folder(published, gallery, checkpoints, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    torch.save(open_clip.create_model("ViT-test").state_dict(), tmp_path / "weights.pt")
    shutil.copy(checkpoints["gare"], tmp_path / "method.ckpt")
    monkeypatch.chdir(tmp_path)
    weights = ScorerSource(architecture="ViT-test", weights="weights.pt", frames=2)
    sources = [ScorerSource("method.ckpt"), weights, replace(weights, weights="none")]  # the same random ones again
    index([gallery / "clip1.mp4"], "index", sources, progress=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with Searcher("../index") as searcher:
        assert searcher.table.fact("scorers")[1]["source"]["weights"] == str(tmp_path / "weights.pt")
        assert len(find(searcher, "a", rerank="clip4clip").results) == 1


def test_an_architecture_from_the_network_is_refused(checkpoints, tmp_path, no_network):
    encoder = {"class_path": "ClipEncoder", "init_args": {"architecture": "hf-hub:owner/model", "weights": "none"}}
    path = changed(checkpoints["clip4clip"], tmp_path / "a.ckpt", encoder=encoder)
    with pytest.raises(CheckpointError, match=r"a\.ckpt: .*hf-hub:owner/model would be downloaded"):
        Scorer(ScorerSource(str(path)))
    assert no_network == []


@pytest.mark.parametrize(
    ("place", "values", "message"),
    [
        ("", {"state_dict": REMOVED}, "no 'state_dict'"),
        ("", {"state_dict": {}}, "does not fit this CLIP4Clip"),
        ("", {"state_dict": [1]}, "more than named tensors"),
        ("", {"state_dict": {"encoder": 1}}, "more than named tensors"),
        ("", {"datamodule_hyper_parameters": [1]}, "data is a list"),
        ("", {"datamodule_hyper_parameters": {"sampling": "none"}}, "sampling"),
        ("hyper_parameters", {"words": "many"}, "words is 'many'; expected a whole number"),
        ("", {"hyper_parameters": {"_class_path": "tvr_lightning.encoders.ClipEncoder"}}, "a retrieval method"),
        ("hyper_parameters encoder init_args", {"width": 63}, "width is 63"),
    ],
)
def test_a_malformed_checkpoint_is_refused_in_one_line(checkpoints, gallery, tmp_path, capsys, place, values, message):
    saved = part = torch.load(checkpoints["clip4clip"], weights_only=True)
    for name in place.split():
        part = part[name]
    part.update(values)
    torch.save({name: value for name, value in saved.items() if value is not REMOVED}, tmp_path / "bad.ckpt")
    out = tmp_path / "index"
    assert main(["index", str(gallery), "--out", str(out), "--ckpt_path", str(tmp_path / "bad.ckpt")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"tvr: {tmp_path / 'bad.ckpt'}")
    assert message in line
    assert not out.exists()
