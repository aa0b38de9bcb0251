"""Exported encoders and heads compute without torch what the method computed, or nothing is written."""

import html
import json
import subprocess
import sys

import ftfy
import numpy as np
import onnxruntime
import pytest
import torch
from search_parts import save_method, write_clip
from tokenizers import Tokenizer

import tvr_lightning
from tvr_lightning.api import export as exporting
from tvr_lightning.cli import main
from tvr_lightning.config.recipe_files import RECIPES
from tvr_lightning.encoders import LoRA
from tvr_lightning.encoders.tokenizer import ClipTokenizer
from tvr_lightning.errors import UserError
from tvr_lightning.methods import XCLIP, CLIP4Clip, XPool
from tvr_lightning.testing import method_recipes, small

SMALL = {"width": 64, "text_layers": 4, "vision_layers": 1, "image_size": 32}
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
