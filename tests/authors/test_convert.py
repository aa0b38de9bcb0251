"""Checkpoints of the authors: recognition, renaming, the command `tvr convert`, and errors."""

import functools
import re

import pytest
import torch
from authors.stand_ins import CASES, D, clip_model, pooling, stand_in, ucofia, with_agent
from encoders.parts import openai_encoder
from parity.case import load_case

import tvr_lightning
from tvr_lightning.authors.convert import (
    clip_configuration,
    convert,
    encoder_section,
    family_of,
    import_checkpoint,
    similarity_header,
)
from tvr_lightning.authors.families import FAMILIES, fitting_keep_rate
from tvr_lightning.authors.names import replace_prefix, with_openai_names
from tvr_lightning.cli import main
from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import MissingWeightsError, TinyWhisperEncoder, Wav2Vec2Encoder, WhisperEncoder, wav2vec2
from tvr_lightning.encoders.clip import build_model
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.errors import UserError
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods.clip4clip import TightTransf
from tvr_lightning.reproduce.released import RELEASED
from tvr_lightning.training.checkpoints import CheckpointError

HEADERS = {"meanP": MeanP(), "seqLSTM": SeqLSTM(1), "seqTransf": SeqTransf(1), "tightTransf": TightTransf(1)}
POSITIONS = "clip.text_model.embeddings.position_ids"  # older transformers saved it
WRAPPED, UNWRAPPED = (f"clip.visual.transformer.resblocks.11.attn.{net}in_proj_bias" for net in ("net.", ""))
WRAPPED_9, UNWRAPPED_9 = WRAPPED.replace("11", "9"), UNWRAPPED.replace("11", "9")
F = 5


@functools.cache
def small_clip():
    torch.manual_seed(0)
    return clip_model(vocabulary=50, positions=11, side=8, patch=4, layers=2)


def tensors_of(name):
    """Return the checkpoint of a recorded case, of UCoFiA, or of a method with transformers' CLIP."""
    if name == "ucofia":
        return ucofia()
    if name in ("xpool", "tmass", "gaid"):
        return pooling(name, small_clip(), F) | {POSITIONS: torch.arange(11)[None]}
    return dict(load_case(CASES / f"{name}.safetensors").checkpoint)


def imported(name, changes=(), **options):
    """Import a checkpoint with tensors changed, or removed if None."""
    tensors = {key: tensor for key, tensor in (tensors_of(name) | dict(changes)).items() if tensor is not None}
    sizes = {"xpool": (7, F), "tmass": (7, F), "gaid": (7, F), "ucofia": (6, 4)}
    words, frames = sizes.get(name, (12, 6))
    return import_checkpoint(tensors, "file", **{"words": words, "frames": frames} | options)


@pytest.mark.parametrize("header", HEADERS)
def test_every_tensor_is_imported_under_our_name(header):
    tensors = tensors_of(f"clip4clip_{header}")
    assert similarity_header(tensors) == HEADERS[header]
    state = imported(f"clip4clip_{header}").state_dict()
    rules = family_of(tensors, "file").rules
    taken = {name: ours for name in tensors if (ours := replace_prefix(name, rules)) in state}
    assert sorted(taken.values()) == sorted(state)
    assert tensors.keys() - taken <= {"frame_position_embeddings.weight"}
    for theirs, ours in taken.items():
        assert torch.equal(state[ours].flatten(), tensors[theirs].flatten()), theirs


def test_methods_are_recognized_by_the_names_of_their_tensors():
    assert {family.name for family in FAMILIES} == RELEASED.keys(), "each has a published result to verify"
    for case in map(load_case, sorted(CASES.glob("*.safetensors"))):
        if case.method in {family.name for family in FAMILIES}:
            assert family_of(case.checkpoint, "file").name == case.method, case.path
    with pytest.raises(UserError, match=r"is a checkpoint of GARE"):
        family_of(["clip.logit_scale", "psi.mean_proj.bias", "weight_fc.0.bias"], "file", "clip4clip")


@torch.no_grad()
def test_the_renamed_clip_gives_the_features_of_transformers():
    renamed, clip = with_openai_names(tensors_of("xpool"), "file"), small_clip()
    state = {name.removeprefix("clip."): tensor for name, tensor in renamed.items() if name.startswith("clip.")}
    encoder = openai_encoder(state)
    ids = torch.tensor([[48, 3, 7, 49, 0, 0], [48, 5, 1, 2, 9, 49]])
    pixels = torch.randn(2, 3, 3, 8, 8)
    padded = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    text = clip.text_projection(clip.text_model(input_ids=ids, attention_mask=padded).pooler_output)
    frames = clip.visual_projection(clip.vision_model(pixel_values=pixels.flatten(0, 1)).pooler_output)
    made = encoder.encode_tokens(ids, padded.bool()).sentence
    torch.testing.assert_close(made, text, rtol=1e-4, atol=1e-5)
    made = encoder.encode_pixels(pixels, torch.ones(2, 3, dtype=torch.bool)).frames
    torch.testing.assert_close(made.flatten(0, 1), frames, rtol=1e-4, atol=1e-5)
    assert with_openai_names(renamed, "file") == renamed


LAYER = "clip.text_model.encoder.layers.0.self_attn.k_proj.weight"
ODD = {"linear.weight": torch.randn(D, 50), "linear.bias": torch.randn(D)}
NARROW = TinyWhisperEncoder(width=32, heads=2)
LN = "transformerClip.resblocks.0.ln_1.bias"
MOVED = {LN: torch.zeros(32), "frame_position": torch.zeros(1), "frame_position_embeddings.weight": None}


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        ("tcmgc", {}, {"method": "clip4clip"}, r"file is a checkpoint of TC-MGC, not of CLIP4Clip.*--method tcmgc"),
        ("clip4clip_seqTransf", MOVED, {},
         r"^file does not fit.*1 missing: frame_position_em.*; 1 unexpected: frame_position .*; 1 of another shape: "
         r"transformerClip\S+ln_1.bias: expected \(64,\), found \(32,\)"),
        ("clip4clip_tightTransf", {}, {"frames": 40}, "positions for 40 words and 39 frames"),
        ("clip4clip_meanP", {}, {"words": 41},
         "41 words and 6 frames do not fit; the checkpoint has positions for 40 words"),
        ("tcmgc", {}, {"words": 2}, "keep 3 words, so they do not fit 2 words; 3 or more words fit"),
        ("tcmgc", {}, {"words": 3}, r"file: keep_rate 1.0 keeps all 3 slots, .* nothing to fuse"),
        ("tcmgc", {"attentive_word_logit_weight": None}, {}, "attentive_word_logit_weight is missing"),
        ("tmass", {}, {"frames": 12}, "for 5 frames, not for 12 frames"),
        ("xclip_meanP", {}, {"words": 32, "frames": 12},
         r"for 12 words and 6 frames, not for 32 words and 12 frames\. Pass --words 12"),
        ("tmass", {LAYER: None}, {}, r"in_proj_weight is missing self_attn\.k_proj"),
        ("tmass", {"clip.text_model.extra": torch.zeros(1)}, {}, r"1 unexpected: clip\.text_model\.extra"),
        ("gaid", {}, {"audio_encoder": NARROW}, r"2 missing: linear\.bias \(64,\), linear\.weight"),
        ("gaid", ODD, {}, "width is 50; expected a multiple of 4"),
        ("ucofia", {}, {"openai": {}}, r"OpenAI's CLIP has no clip\.visual\.transformer\.resblocks\.10\.attn"),
        ("ucofia", {UNWRAPPED: torch.zeros(1)}, {}, r"unexpected .* clip\.visual\..*\.11\.attn\.in_proj_bias"),
        ("ucofia", {WRAPPED_9: torch.zeros(1), UNWRAPPED_9: None}, {}, r"resblocks\.9\.attn\.net\.in_proj_bias"),
    ],
)  # fmt: skip
def test_tensors_and_options_that_do_not_fit_are_named(name, changes, options, message):
    with pytest.raises(UserError, match=message):
        imported(name, changes, **options)


@pytest.mark.parametrize("temporal", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_drl_may_have_one_to_three_layers_per_weight_and_no_temporal_transformer(layers, temporal):
    clip = tensors_of("clip4clip_seqTransf")
    clip = {name: tensor for name, tensor in clip.items() if temporal or not name.startswith("transformerClip.")}
    names = ["0.", "2.", "4."][:layers] if layers > 1 else [""]
    for side in ("text", "video"):
        for name in names:
            outputs = 1 if name == names[-1] else 64
            clip[f"{side}_weight_fc.{name}weight"] = torch.randn(outputs, 64)
            clip[f"{side}_weight_fc.{name}bias"] = torch.randn(outputs)
    module = import_checkpoint(clip, "file", words=12, frames=6)
    assert (module.temporal is not None) is temporal
    network = module.head.word_weights if layers == 1 else module.head.word_weights[-1]
    assert torch.equal(network.weight, clip[f"text_weight_fc.{names[-1]}weight"])


def test_gare_may_have_no_temporal_transformer():
    checkpoint = tensors_of("gare")
    msvd = {name: tensor for name, tensor in checkpoint.items() if not name.startswith("transformerClip.")}
    module = import_checkpoint(msvd, "file", words=12, frames=6)
    assert module.temporal is None
    assert torch.equal(module.head.psi.q_proj.weight, msvd["psi.layers.0.cross_attn.q_proj.weight"])


def test_words_and_frames_up_to_the_positions_and_matrices_fit():
    assert imported("clip4clip_tightTransf", words=40, frames=39).frames == 39
    assert imported("tcmgc").options.keep_rate == 0.3  # its matrices keep 3
    assert imported("tcmgc", words=32).options.keep_rate == 0.1


@pytest.mark.parametrize("words", [3, 12, 32, 49, 64, 77])
def test_the_keep_rate_of_a_checkpoint_keeps_the_right_number(words):
    for kept in range(1, words + 1):
        assert int(words * fitting_keep_rate(kept, words)) == kept
    with pytest.raises(ValueError, match="or more words fit"):
        fitting_keep_rate(words + 1, words)


def test_the_wrapped_attentions_of_ucofia_shift_patches():
    saved = ucofia()
    plain = {name.replace(".attn.net.", ".attn."): tensor for name, tensor in saved.items()}
    made, without = (import_checkpoint(tensors, "file", words=6, frames=4) for tensors in (saved, plain))
    assert without.encoder.patch_shift is None
    assert torch.equal(made.encoder.clip.visual.transformer.resblocks[11].attn.in_proj_bias, saved[WRAPPED])
    media = Media(torch.randint(0, 256, (2, 4, 3, 32, 32), dtype=torch.uint8), torch.ones(2, 4).bool())
    with torch.no_grad():
        frames = [module.encoder.encode_media(media, patches=True).frames for module in (made, without)]
    assert (frames[0] - frames[1]).abs().max() > 1e-3


def test_the_released_evaluation_of_ucofia_uses_the_attentions_of_openai_and_no_l1():
    zeros = {name.replace(".net.", "."): torch.zeros_like(tensor) for name, tensor in ucofia().items()}
    openai = {name.removeprefix("clip."): tensor for name, tensor in zeros.items()}
    made = imported("ucofia", openai=openai)
    blocks = made.encoder.clip.visual.transformer.resblocks
    assert not any(tensor.any() for block in blocks[10:] for tensor in block.attn.state_dict().values())
    assert all(tensor.any() for tensor in blocks[9].attn.state_dict().values())
    assert made.head.patch_matrix is None
    assert made.options.patch_selection.noise_eval


def test_the_predictor_of_the_evaluation_code_of_ucofia_has_no_l1():
    shapes = {"in_conv.0.weight": (2 * D,), "in_conv.0.bias": (2 * D,), "in_conv.1.weight": (D, 2 * D)}
    shapes |= {"out_conv.0.weight": (D, 2 * D), "out_conv.2.weight": (1, D)}
    predictor = {f"visual_token_selector.score_predictor.{name}": torch.randn(shape) for name, shape in shapes.items()}
    made = imported("ucofia", predictor)
    assert made.head.patch_matrix is None
    assert made.options.patch_selection.predictor == "eval-t2v"


@pytest.fixture
def converted(tmp_path):
    """Convert tensors; return the module and the text."""

    def run(tensors, **options):
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        module, lines = convert(tmp_path / "pytorch_model.bin", tmp_path / "out.ckpt", **options)
        return module, "\n".join(lines)

    return run


def test_the_output_shows_method_sizes_and_next_command(converted, tmp_path):
    _, output = converted(tensors_of("tcmgc"), words=12, frames=6)
    shown = ("TCMGC", "keep_rate: 0.3", "frames: 6", f"tvr test --ckpt_path {tmp_path / 'out.ckpt'}")
    assert all(text in output for text in shown)
    assert "softmax_lambda" not in output  # a default
    assert "float16" not in output


@pytest.mark.parametrize("source", ["model.bin", "clip.pt"])
def test_a_conversion_never_overwrites_what_it_reads(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("model.bin", "clip.pt"):
        torch.save(tensors_of("clip4clip_meanP"), name)
    before = (tmp_path / source).read_bytes()
    (tmp_path / "out.ckpt").symlink_to(source)
    assert main(["convert", "model.bin", "out.ckpt", "--openai_clip=clip.pt"]) == 2
    assert f"out.ckpt is the file {source}, which is read" in capsys.readouterr().err
    assert (tmp_path / source).read_bytes() == before


def test_half_precision_is_converted_to_float32(converted, tmp_path):
    tensors = tensors_of("clip4clip_meanP")
    half = tensors["clip.visual.proj"].half()
    assert "1 float16 tensors are now float32" in converted(tensors | {"clip.visual.proj": half})[1]
    state = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(state["encoder.clip.visual.proj"], half.float())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_known_architectures_are_named_and_other_sizes_are_written_out():
    switches = {"text_mask": False, "patch_shift": False}
    vision = {"width": 64, "layers": 1, "patch_size": 16, "image_size": 32, "head_width": 64}
    text = {"width": 64, "layers": 1, "context_length": 40, "vocab_size": 128, "heads": 1}
    configuration = {"embed_dim": 64, "quick_gelu": True, "vision_cfg": vision, "text_cfg": text}
    assert encoder_section(clip_configuration(tensors_of("clip4clip_meanP")), switches) == {
        "class_path": "SizedClipEncoder",
        "init_args": {"configuration": configuration, **switches},
    }
    for architecture in ("ViT-B-32", "ViT-B-16", "ViT-L-14"):
        with torch.device("meta"):
            model = build_model(model_configuration(architecture), "float32")
        named = {f"clip.{name}": tensor for name, tensor in model.state_dict().items()}
        assert encoder_section(clip_configuration(named), switches) == {
            "class_path": "ClipEncoder",
            "init_args": {"architecture": architecture, "weights": "openai", **switches},
        }


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tcmgc", {"method": "clip"}, r"The method 'clip' is not supported. Available: .*clip4clip.* tcmgc"),
        ("tcmgc", {"openai_clip": CASES / "tcmgc.safetensors"}, "--openai_clip is only for UCoFiA"),
        (None, {}, r"no known method has these tensors: further\.weight"),
    ],
)
def test_bad_checkpoints_are_refused_without_output(converted, tmp_path, name, options, message):
    with pytest.raises(UserError, match=message):
        converted(tensors_of(name) if name else {"further.weight": torch.ones(1)}, **options)
    assert not (tmp_path / "out.ckpt").exists()


def test_both_copies_of_psi_of_gare_must_be_equal(converted):
    saved = with_agent(tensors_of("gare"))
    for name in ("agent.psi.mean_proj.bias", "agent.psi.log_std_proj.weight"):  # read, and never used
        with pytest.raises(UserError, match=rf"differ from those without 'agent\.'.*: {name}$"):
            converted(saved | {name: saved[name] + 1e-3})


def save_whisper(folder):
    """Save random weights of Whisper base where openai-whisper keeps its own."""
    encoder = WhisperEncoder("base", weights=None)
    dimensions = {"n_audio_state": 512, "n_audio_head": 8, "n_audio_layer": 6, "n_audio_ctx": 1500}
    state = {f"encoder.{name}": tensor for name, tensor in encoder.encoder.state_dict().items()}
    (folder / "whisper").mkdir()
    torch.save({"dims": dimensions | {"n_mels": 80}, "model_state_dict": state}, folder / "whisper" / "base.pt")
    return encoder


def save_wav2vec2(folder):
    """Save random weights of wav2vec 2.0 base where transformers keeps its own."""
    cached = folder / "hub" / "models--facebook--wav2vec2-base"
    encoder = Wav2Vec2Encoder("base", weights=None)
    encoder.model.save_pretrained(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    return encoder


@pytest.mark.parametrize(
    ("save", "width", "error", "missing", "audio"),
    [
        (save_whisper, 512, MissingWeightsError, r"Whisper base .* has no weights", ("whisper", 30)),
        (save_wav2vec2, 768, CheckpointError, r"wav2vec2 base .* has no weights", ("wav2vec2", 60)),  # the whole track
    ],
)
def test_gaid_loads_its_audio_encoder_from_the_hub(save, width, error, missing, audio, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(wav2vec2.SIZES, "base", (768, 2, 1))  # one layer instead of twelve
    tensors = stand_in("gaid") | {"linear.weight": torch.randn(64, width), "linear.bias": torch.randn(64)}
    torch.save(tensors, tmp_path / "gaid.pth")
    assert main(["convert", str(tmp_path / "gaid.pth"), str(tmp_path / "out.ckpt")]) == 0
    assert re.search(missing, capsys.readouterr().out)
    written = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert not any(name.startswith("audio_encoder.") for name in written["state_dict"])
    data = written["datamodule_hyper_parameters"]
    assert (data["audio"], data["audio_alignment"], data["audio_seconds"]) == (audio[0], "clip30", audio[1])
    with pytest.raises(error, match=missing):
        tvr_lightning.load(tmp_path / "out.ckpt")
    encoder = save(tmp_path)
    loaded = tvr_lightning.load(tmp_path / "out.ckpt").module
    assert torch.equal(loaded.audio_projection.weight, tensors["linear.weight"])
    assert all(map(torch.equal, loaded.audio_encoder.state_dict().values(), encoder.state_dict().values()))
