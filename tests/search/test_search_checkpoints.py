"""Checkpoints for `tvr index`: methods of other packages, untrusted class names, and no network."""

import json
import sys

import open_clip
import pytest
import torch
from examples.dual_softmax_loss import DualSoftmaxLoss
from open_clip import pretrained
from search_parts import save_checkpoint

from tvr_lightning.cli import main
from tvr_lightning.encoders import ClipEncoder, TinyClipEncoder
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import find_weights, weights_follow
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import Scorer, ScorerSource
from tvr_lightning.training.checkpoints import CheckpointError

TINY = {"width": 64, "image_size": 32, "text_layers": 1, "vision_layers": 1}
ARGUMENTS = {"words": 12, "frames": 4}
CHAIN = {"class_path": "NormalizerChain", "init_args": {"normalizers": ["strangers.Normalizer"]}}


def changed(source, path, **arguments):
    """The checkpoint with other hyperparameters."""
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
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "names examples.dual_softmax_loss.DualSoftmaxLoss" in said
    assert "--trust examples.dual_softmax_loss" in said
    trust = ["--trust", "somewhere.else", "--trust", path]
    assert main([*command, *trust]) == 0
    for more, status in (([], 1), (trust, 0)):
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


@pytest.mark.parametrize(
    "arguments",
    [
        {"_class_path": "strangers.CLIP4Clip"},
        {"encoder": {"class_path": "strangers.Encoder"}},
        {"encoder": "strangers.Encoder"},
        {"encoder": "{class_path: strangers.Encoder}"},
        {"encoder": "{'cl\\x61ss_path': strangers.Encoder}"},
        {"evaluation": "{normalization: strangers.Encoder}"},
        {"evaluation": {"normalization": "strangers.Encoder"}},
        {"evaluation": {"normalization": CHAIN}},
        {"optimizer": "strangers.Encoder"},
    ],
)  # fmt: skip
def test_nothing_that_a_checkpoint_names_is_imported_unasked(checkpoints, tmp_path, monkeypatch, arguments):
    (tmp_path / "strangers.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = changed(checkpoints["clip4clip"], tmp_path / "a.ckpt", **arguments)
    with pytest.raises(CheckpointError, match=r"a\.ckpt:? (names strangers|\w+\.\w+ is the text)"):
        Scorer(ScorerSource(str(path)))
    assert "strangers" not in sys.modules


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


def test_the_weights_of_a_checkpoint_are_its_own_and_nothing_is_downloaded(published, tmp_path, no_network, caplog):
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


def test_the_weights_of_an_index_have_absolute_paths(published, gallery, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    model = open_clip.create_model("ViT-test")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    monkeypatch.chdir(tmp_path)
    source = ScorerSource(architecture="ViT-test", weights="weights.pt", frames=2)
    index([gallery], "index", [source], progress=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with Searcher("../index") as searcher:
        assert searcher.catalog.fact("scorers")[0]["source"]["weights"] == str(tmp_path / "weights.pt")


def test_an_architecture_from_the_network_is_refused(checkpoints, tmp_path, no_network):
    encoder = {"class_path": "ClipEncoder", "init_args": {"architecture": "hf-hub:somebody/model", "weights": "none"}}
    path = changed(checkpoints["clip4clip"], tmp_path / "a.ckpt", encoder=encoder)
    with pytest.raises(CheckpointError, match=r"a\.ckpt: .*hf-hub:somebody/model would be downloaded"):
        Scorer(ScorerSource(str(path)))
    with pytest.raises(ValueError, match="would be downloaded"):
        find_weights("hf-hub:somebody/model", None)
    assert no_network == []


def named(path):
    return lambda saved: saved["hyper_parameters"].update(_class_path=path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda saved: saved.pop("state_dict"), "no 'state_dict'"),
        (lambda saved: saved.update(state_dict={}), "does not fit this CLIP4Clip"),
        (lambda saved: saved.update(state_dict=[1]), "more than named tensors"),
        (lambda saved: saved.update(state_dict={"encoder": 1}), "more than named tensors"),
        (lambda saved: saved["hyper_parameters"].update(words="many"), "words"),
        (lambda saved: saved["hyper_parameters"].update(encoder=3), "encoder"),
        (lambda saved: saved["hyper_parameters"]["encoder"]["init_args"].update(width=63), "width is 63"),
        (lambda saved: saved["hyper_parameters"]["encoder"]["init_args"].update(color="red"), "color"),
        (lambda saved: saved["hyper_parameters"].update(_instantiator="os.system"), "os.system"),
        (named("tvr_lightning.encoders.ClipEncoder"), "a retrieval method"),
        (named("tvr_lightning.methods.Nothing"), "cannot be found"),
        (lambda saved: saved.update(datamodule_hyper_parameters=[1]), "datamodule_hyper_parameters"),
        (lambda saved: saved.update(datamodule_hyper_parameters={"sampling": "none"}), "sampling"),
    ],
)
def test_a_malformed_checkpoint_ends_in_a_sentence_and_leaves_nothing(
    checkpoints, gallery, tmp_path, capsys, spoil, said
):
    saved = torch.load(checkpoints["clip4clip"], weights_only=True)
    spoil(saved)
    torch.save(saved, tmp_path / "bad.ckpt")
    out = tmp_path / "index"
    assert main(["index", str(gallery), "--out", str(out), "--ckpt_path", str(tmp_path / "bad.ckpt")]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"tvr: {tmp_path / 'bad.ckpt'}")
    assert said in line
    assert not out.exists()
