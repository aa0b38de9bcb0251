"""Compiled towers: the same features and gradients under the same names; plain ones where nothing can compile."""

import shutil

import pytest
import torch

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.encoders.compiled import compile_blocks


def encoder(compile_towers: bool) -> TinyClipEncoder:
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, text_layers=2, vision_layers=2, compile_towers=compile_towers)


def media() -> Media:
    pixels = torch.randint(0, 256, (3, 2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Media(pixels, torch.ones(3, 2, dtype=torch.bool))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.filterwarnings("ignore")  # what torch's own compiler deprecates
def test_compiled_towers_give_the_features_and_gradients_of_plain_ones():
    found = []
    for compiled in (False, True):
        made = encoder(compiled)
        text, video = made.encode_text(["a cat", "two dogs run", "rain"], 12), made.encode_video(media(), patches=True)
        (text.words.square().mean() + video.patches.square().mean() + video.frames.square().mean()).backward()
        found.append((text.words, video.frames, {k: p.grad for k, p in made.named_parameters()}, made.state_dict()))
    plain, compiled = found
    torch.testing.assert_close(compiled[0], plain[0])
    torch.testing.assert_close(compiled[1], plain[1])
    assert compiled[3].keys() == plain[3].keys()
    for name, gradient in plain[2].items():
        torch.testing.assert_close(compiled[2][name], gradient, msg=lambda m, n=name: f"{n}: {m}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2  # of texts and of frames


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Triton compiles")
@pytest.mark.filterwarnings("ignore")  # what torch's own compiler deprecates
def test_where_compiling_fails_one_line_says_so_and_the_towers_run_plain(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "a-compiler-that-is-not-there"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        made = encoder(True)
        video = made.encode_video(media())
    torch._dynamo.reset()
    torch.testing.assert_close(video.frames, encoder(False).encode_video(media()).frames)
    (said,) = [record.message for record in caplog.records if "compile_towers" in record.message]
    assert said.startswith("compile_towers: torch.compile failed (")
    assert said.endswith("the towers run uncompiled")
    assert "\n" not in said
    made.encode_text(["a cat"], 12)
    assert [record.message for record in caplog.records if "compile_towers" in record.message] == [said]


def test_towers_without_blocks_are_refused():
    with pytest.raises(ValueError, match="Linear is not a transformer"):
        compile_blocks([torch.nn.Linear(2, 2)])
