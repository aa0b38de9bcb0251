"""`tvr convert`: the file that comes out loads safely and scores as the authors' checkpoint did."""

import pytest
import torch
from parity.case import load_case
from parity.compute.features import encode_case
from safetensors.torch import load_file

from tvr_lightning.authors.checkpoint import AuthorsCheckpointError
from tvr_lightning.authors.clip import clip_sizes, encoder_configuration
from tvr_lightning.authors.convert import convert, run_convert
from tvr_lightning.encoders.clip import ClipEncoder
from tvr_lightning.methods.clip4clip import CLIP4Clip
from tvr_lightning.methods.tcmgc.method import TCMGC


def authors_file(parity_cases, name, tmp_path):
    case = load_case(parity_cases / f"{name}.safetensors")
    torch.save(case.checkpoint, tmp_path / "pytorch_model.bin")
    return case, tmp_path / "pytorch_model.bin"


def encoder_of(case):
    clip = {n.removeprefix("clip."): t for n, t in case.checkpoint.items() if n.startswith("clip.")}
    return ClipEncoder.from_openai_state_dict(clip)


@pytest.mark.parametrize(
    ("name", "method", "cls"),
    [
        ("clip4clip_seqTransf", "clip4clip", CLIP4Clip),
        ("clip4clip_tightTransf", "clip4clip", CLIP4Clip),
        ("tcmgc", "tcmgc", TCMGC),
    ],
)
@torch.no_grad()
def test_a_converted_checkpoint_scores_as_the_authors_did(parity_cases, tmp_path, name, method, cls):
    case, source = authors_file(parity_cases, name, tmp_path)
    out = tmp_path / "made" / "out.ckpt"
    assert run_convert(method, source, out, words=12, frames=6) == 0
    content = torch.load(out, weights_only=True)
    assert content["hyper_parameters"]["words"] == 12
    assert {"temperature.logit_scale", "encoder.clip.text_projection"} <= content["state_dict"].keys()
    model = cls.load_from_checkpoint(out, encoder=encoder_of(case), weights_only=True).eval()
    text, video = encode_case(case, model.encoder)
    similarity = model.score(text, model.encode_video(video)).similarity
    logits = similarity if name.endswith("tightTransf") else model.temperature() * similarity
    torch.testing.assert_close(logits, case.expected["similarity"], rtol=1e-4, atol=1e-4)


def test_the_conversion_says_what_the_recipe_must_say(parity_cases, tmp_path, capsys):
    _, source = authors_file(parity_cases, "tcmgc", tmp_path)
    run_convert("tcmgc", source, tmp_path / "out.ckpt", words=12, frames=6)
    output = capsys.readouterr().out
    assert "TCMGC" in output
    assert "keep_rate: 0.3" in output
    assert "frames: 6" in output
    assert "softmax_lambda" not in output  # a default
    assert "sizes of no architecture that recipes know" in output


def test_known_architectures_are_recognised_by_their_sizes(parity_cases):
    case = load_case(parity_cases / "clip4clip_meanP.safetensors")
    assert encoder_configuration(case.checkpoint) is None
    assert clip_sizes(case.checkpoint) == {
        "dimension": 64,
        "vision_width": 64,
        "vision_layers": 1,
        "patch_size": 16,
        "image_size": 32,
        "text_width": 64,
        "text_layers": 1,
        "context_length": 40,
        "vocabulary": 128,
    }
    large = {
        "clip.visual.conv1.weight": torch.empty(768, 3, 16, 16, device="meta"),
        "clip.visual.positional_embedding": torch.empty(197, 768, device="meta"),
        "clip.visual.proj": torch.empty(768, 512, device="meta"),
        "clip.positional_embedding": torch.empty(77, 512, device="meta"),
        "clip.text_projection": torch.empty(512, 512, device="meta"),
        "clip.token_embedding.weight": torch.empty(49408, 512, device="meta"),
    }
    for n in range(12):
        for tower in ("clip.visual.transformer", "clip.transformer"):
            large[f"{tower}.resblocks.{n}.ln_1.bias"] = torch.empty(1, device="meta")
    assert encoder_configuration(large) == {
        "class_path": "ClipEncoder",
        "init_args": {"architecture": "ViT-B-16-quickgelu", "weights": "none"},
    }


def test_bad_sources_write_nothing(parity_cases, tmp_path):
    _, source = authors_file(parity_cases, "tcmgc", tmp_path)
    out = tmp_path / "out.ckpt"
    with pytest.raises(AuthorsCheckpointError, match="these are TC-MGC's names"):
        convert("clip4clip", source, out, words=12, frames=6)
    with pytest.raises(AuthorsCheckpointError, match=r"no importer for the method 'clip'; known: .*clip4clip.* tcmgc"):
        convert("clip", source, out)
    assert not out.exists()


def test_the_authors_checkpoint_itself_is_untouched(parity_cases, tmp_path):
    case, source = authors_file(parity_cases, "clip4clip_meanP", tmp_path)
    before = source.read_bytes()
    convert("clip4clip", source, tmp_path / "out.ckpt", words=12, frames=6)
    assert source.read_bytes() == before
    stored = load_file(case.path)
    assert torch.equal(stored["checkpoint.clip.visual.proj"], case.checkpoint["clip.visual.proj"])
