"""Scores of a checkpoint in Python, merged encoders, and exports that compute without torch."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import ftfy
import numpy as np
import onnxruntime
import open_clip
import pytest
import torch
from search_parts import save_method, write_clip
from tokenizers import Tokenizer

import tvr_lightning
from tvr_lightning.api import export as exporting
from tvr_lightning.api.model import Model
from tvr_lightning.cli import main
from tvr_lightning.config.recipe_files import RECIPES
from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.encoders import Adapter, LoRA, TinyClipEncoder
from tvr_lightning.encoders.clip import build_model
from tvr_lightning.encoders.tokenizer import ClipTokenizer
from tvr_lightning.errors import UserError
from tvr_lightning.media.container import VideoError
from tvr_lightning.methods import GARE, NCL, XCLIP, CLIP4Clip, XPool
from tvr_lightning.testing import method_recipes, small
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.training.checkpoints import CheckpointError

SMALL = {"width": 64, "text_layers": 4, "vision_layers": 1, "image_size": 32}
TEXTS = ["a red star moves left", "a small dog", "a person sings"]


@pytest.fixture(scope="module", params=[GARE, XPool], ids=lambda kind: kind.__name__)
def checkpoint(request, tmp_path_factory):
    return save_method(request.param, tmp_path_factory.mktemp("run") / "last.ckpt", SMALL, 3)


def test_videos_and_texts_get_the_scores_of_the_method(checkpoint, tmp_path):
    clips = [write_clip(tmp_path / f"{number}.mp4", number) for number in range(2)]
    model = tvr_lightning.load(checkpoint)
    text, video = model.encode_text(TEXTS), model.encode_video(clips)
    assert text.sentence.shape == (3, 64)
    assert video.frames.shape[:2] == (2, 3)
    scores = model.score(TEXTS, clips)
    assert torch.equal(scores, model.score(text, video))
    assert scores[1, 1] == pytest.approx(model.score(TEXTS[1], clips[1]).item(), abs=1e-6)
    assert not torch.equal(scores[:, 0], scores[:, 1])
    module, batches = model.module, [VideoBatch(model.scorer.read(c).media, torch.arange(1), ["0"]) for c in clips]
    with torch.no_grad():
        own_videos = type(video).cat([module.video_features(batch) for batch in batches])
        own = module.score(module.text_features(TextBatch(TEXTS, torch.arange(3))), own_videos)
    torch.testing.assert_close(scores, own.similarity)


def test_models_describe_themselves_and_missing_files_are_named(checkpoint, tmp_path):
    with pytest.raises(UserError, match=r'Use tvr_lightning\.zero_shot\("ViT-B-32"\)'):
        tvr_lightning.load("ViT-B-32")
    assert {*tvr_lightning.__all__} <= {*dir(tvr_lightning)}
    model = tvr_lightning.load(checkpoint)
    assert isinstance(model, Model)
    assert repr(model).startswith(f"Model({type(model.module).__name__}, TinyClipEncoder")
    assert repr(model).endswith(f"{checkpoint}: 64-dimensional, 12 tokens, 3 frames)")
    assert repr(model.encode_text(TEXTS)) == "TextFeatures(sentence (3, 64), words (3, 12, 64), word_mask (3, 12))"
    with pytest.raises(VideoError, match=r"absent\.mp4"):
        model.encode_video(tmp_path / "absent.mp4")
    with pytest.raises(UserError, match="1 audio files are given for 2 videos"):
        model.encode_video(["a.mp4", "b.mp4"], audio=[tmp_path / "a.wav"])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_example_of_a_plain_trainer_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    example = page.partition("## Methods")[2].partition("```python\n")[2].partition("```")[0]
    assert len(example.splitlines()) <= 15
    monkeypatch.chdir(tmp_path)
    exec(example, {"__name__": "__main__"})


def test_a_checkpoint_whose_encoder_was_built_in_python_asks_for_it(tmp_path):
    method = CLIP4Clip(TinyClipEncoder(**SMALL), frames=3, words=12, contrast=NCL())
    trainer = quiet_trainer(max_epochs=0)
    trainer.strategy.connect(method)
    path = tmp_path / "own.ckpt"
    trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"own\.ckpt does not record its encoder, .* as `encoder`, or"):
        tvr_lightning.load(path)
    with pytest.raises(CheckpointError, match=r"expected none\. Use the contrast that it was trained with"):
        CLIP4Clip.load_from_checkpoint(path, encoder=TinyClipEncoder(**SMALL), weights_only=True)
    built = {"encoder": TinyClipEncoder(**SMALL), "contrast": NCL()}
    loaded = CLIP4Clip.load_from_checkpoint(path, **built, weights_only=True)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in method.state_dict().items())


CONFIGURATION = {
    "embed_dim": 64,
    "vision_cfg": {"width": 64, "layers": 1, "patch_size": 16, "image_size": 32},
    "text_cfg": {"width": 64, "layers": 4, "heads": 1, "context_length": 77},
}


def test_open_clip_computes_the_features_of_a_merged_encoder(tmp_path):
    tuning = LoRA(targets=["query", "key", "output", "mlp"])
    checkpoint = save_method(CLIP4Clip, tmp_path / "last.ckpt", SMALL, 2, tuning, noise=0.1)
    tvr_lightning.merge(checkpoint, tmp_path / "merged.pt")
    merged = build_model(CONFIGURATION, "float32").eval()
    open_clip.load_checkpoint(merged, str(tmp_path / "merged.pt"))
    module = tvr_lightning.load(checkpoint).module
    encoder = module.encoder
    pixels, ids = torch.randn(3, 3, 32, 32), encoder.tokenizer.encode(["a red star", "a dog"], 77).ids
    with torch.no_grad():
        frames = encoder.encode_pixels(pixels[None], torch.ones(1, 3, dtype=torch.bool)).frames[0]
        torch.testing.assert_close(merged.encode_image(pixels), frames)
        torch.testing.assert_close(merged.encode_text(ids), encoder.encode_tokens(ids).sentence)
    assert merged.logit_scale.item() == module.temperature.logit_scale.item()


def test_an_encoder_with_adapters_cannot_be_merged(tmp_path):
    checkpoint = save_method(CLIP4Clip, tmp_path / "last.ckpt", SMALL, 2, Adapter())
    with pytest.raises(UserError, match=r"last\.ckpt: open_clip has no model with adapters"):
        tvr_lightning.merge(checkpoint, tmp_path / "merged.pt")
    assert not (tmp_path / "merged.pt").exists()


@pytest.mark.parametrize("out", ["last.ckpt", "link.pt", "../merged/last.ckpt", "hard.pt"])
def test_the_checkpoint_is_never_overwritten(out, tmp_path, monkeypatch):
    (tmp_path / "merged").mkdir()
    checkpoint = save_method(CLIP4Clip, tmp_path / "merged" / "last.ckpt", SMALL, 2)
    before = checkpoint.read_bytes()
    monkeypatch.chdir(tmp_path / "merged")
    Path("link.pt").symlink_to("last.ckpt")
    Path("hard.pt").hardlink_to("last.ckpt")
    with pytest.raises(UserError, match=rf"{re.escape(out)} is the file .*last\.ckpt, which is read"):
        tvr_lightning.merge(checkpoint, out)
    assert checkpoint.read_bytes() == before


def test_a_merge_that_fails_keeps_the_previous_file(tmp_path, limit_files):
    checkpoint, out = save_method(CLIP4Clip, tmp_path / "last.ckpt", SMALL, 2), tmp_path / "merged.pt"
    out.write_bytes(b"previous")
    limit_files(1 << 10)
    with pytest.raises(UserError, match=r"merged\.pt could not be written .*The previous file is intact"):
        tvr_lightning.merge(checkpoint, out)
    assert out.read_bytes() == b"previous"
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "merged.pt"}


RUN = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tuning"), [(CLIP4Clip, LoRA()), (XPool, None), (XCLIP, None)])
def test_the_example_ranks_videos_without_torch_as_the_method_does(kind, tuning, tmp_path, capsys):
    checkpoint, out = save_method(kind, tmp_path / "last.ckpt", SMALL, 4, tuning, noise=0.05), tmp_path / "exported"
    videos = [str(write_clip(tmp_path / f"{number}.mp4", number, 12 + 8 * number)) for number in range(3)]
    assert main(["export", str(checkpoint), str(out)]) == 0
    assert "video.onnx: differs from torch by at most" in capsys.readouterr().out
    settings = json.loads((out / "export.json").read_text())
    frames = 4 if kind is XCLIP else "F"  # X-CLIP has weights per frame
    assert settings["files"]["video.onnx"]["inputs"]["pixels"] == ["uint8", "M", frames, 3, 32, 32]
    assert set(settings["files"]) == {"text.onnx", "video.onnx"} | (set() if kind is CLIP4Clip else {"head.onnx"})
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(out / "example.py"), "A red ball &amp; a dog", *videos],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = {path: score for score, path in map(eval, done.stdout.splitlines())}
    expected = tvr_lightning.load(checkpoint).score("A red ball &amp; a dog", videos)[0]
    assert [found[path] for path in videos] == pytest.approx(expected.tolist(), abs=1e-4)
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".mp4"} == {"last.ckpt", "exported"}
    assert "WARNING" not in done.stderr
    (out / "export.json").write_text(json.dumps(settings | {"sampling": "segment-centers"}))
    other = subprocess.run([*done.args[:4], "a dog", videos[0]], capture_output=True, text=True, check=True)
    assert "WARNING: export.json describes other frames" in other.stderr


@pytest.mark.slow
def test_an_encoder_without_training_is_exported_with_random_weights(tmp_path):
    tvr_lightning.export("ViT-S-32-alt", tmp_path / "exported", weights="none", frames=2)
    session = onnxruntime.InferenceSession(tmp_path / "exported" / "text.onnx")
    tokens = Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json")).encode_batch(["a dog", "two cats"])
    (ids,) = session.get_inputs()  # this tower does not use the mask of words
    (vectors,) = session.run(["text_vector"], {ids.name: np.array([each.ids for each in tokens])})
    expected = tvr_lightning.zero_shot("ViT-S-32-alt", "none").encode_text(["a dog", "two cats"]).sentence
    np.testing.assert_allclose(vectors, torch.nn.functional.normalize(expected), atol=1e-4)


@pytest.mark.slow
def test_nothing_stays_of_an_export_that_differs_from_torch(tmp_path, monkeypatch):
    checkpoint = save_method(CLIP4Clip, tmp_path / "last.ckpt", SMALL, 4)
    monkeypatch.setattr(exporting, "TOLERANCE", 1e-9)
    with pytest.raises(UserError, match=r"CLIP4Clip cannot be exported: text\.onnx differs from torch by"):
        tvr_lightning.export(checkpoint, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def refused(*words):
    with pytest.raises(UserError) as error:
        tvr_lightning.export(*words[:2], **dict(words[2:]))
    return str(error.value)


def test_what_cannot_be_exported_is_refused_with_the_reason(tmp_path, monkeypatch):
    checkpoint, out, text = (tmp_path / name for name in ("last.ckpt", "exported", "text.ckpt"))
    save_method(CLIP4Clip, checkpoint, SMALL, 4)
    text.write_text("no checkpoint")
    assert refused(checkpoint, tmp_path) == f"{tmp_path} exists. Choose a new folder, or delete it."
    assert "last.ckpt is not an open_clip architecture" in refused(checkpoint, out, ("weights", "openai"))
    assert "text.ckpt: cannot be read as a checkpoint" in refused(text, out)
    assert "ViT-B-23: no such checkpoint" in refused("ViT-B-23", out)
    gaid = small(method_recipes(RECIPES)["GAID"])[0]
    assert exporting.obstacle(gaid) == "it reads audio. Only methods of texts and frames can be exported"
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert refused(checkpoint, out) == "tvr export needs onnxscript: pip install 'tvr-lightning[onnx]'"
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "text.ckpt"}


@pytest.mark.parametrize("words", [3, 12, 77])
def test_the_exported_tokenizer_gives_the_ids_of_clip(words, tmp_path):
    captions = [
        "a dog", "", " two  spaces\tand\ntabs ", "A Dog's life, isn't it? 100% don't!!", "&amp;lt; &quot;x&quot;",
        "caf\u00e9 \u00c9COLE \u4e2d\u6587 \U0001f600", "<|startoftext|> hi <|endoftext|>", "snake_case", "x" * 99,
        "\u2014 dash \u2026 \u201cquotes\u201d", "1234 3.14", "<start_of_text> no", "e\u0301 combining", "a " * 99,
    ]  # fmt: skip
    own = ClipTokenizer(77)
    (tmp_path / "tokenizer.json").write_text(json.dumps(own.portable(words)))
    cleaned = [html.unescape(html.unescape(ftfy.fix_text(caption))).strip() for caption in captions]
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode_batch(cleaned)
    expected = own.encode(captions, words)
    assert [each.ids for each in found] == expected.ids.tolist()
    assert [each.attention_mask for each in found] == expected.mask.int().tolist()
