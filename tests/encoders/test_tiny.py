"""The tiny encoder: sizes, compiled towers, and sharding."""

import math
import re
import shutil
import warnings

import pytest
import torch
from encoders.parts import random_media
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.layers.temperature import Temperature
from tvr_lightning.testing import run_processes
from tvr_lightning.training.sharding import shard as shard_method


def test_shapes_are_as_configured():
    encoder = TinyClipEncoder(width=128, image_size=48, patch_size=16, text_layers=5, context_length=20)
    assert (encoder.dimension, encoder.image_size, encoder.context_length) == (128, 48, 20)
    assert encoder.encode_video(random_media(48), patches=True).patches.shape == (2, 3, 9, 128)
    assert encoder.encode_text(["a red ball", "a blue box"], 20).words.shape == (2, 20, 128)
    assert len(encoder.temporal_initialization(5).blocks) == 5
    assert len(encoder.clip.visual.transformer.resblocks) == 4


def test_weights_can_come_from_a_run(tmp_path):
    trained = TinyClipEncoder(width=64, image_size=32, vision_layers=1)
    state = {f"encoder.{name}": value for name, value in trained.state_dict().items()}
    torch.save({"state_dict": state | {"head.weight": torch.ones(2)}}, tmp_path / "last.ckpt")
    path = str(tmp_path / "last.ckpt")
    started = TinyClipEncoder(width=64, image_size=32, vision_layers=1, trained_in=path)
    assert started.fingerprint() == trained.fingerprint()
    with pytest.raises(ValueError, match="multiple of 64"):
        TinyClipEncoder(width=100)
    with pytest.raises(ValueError, match="50 must be a multiple"):
        TinyClipEncoder(image_size=50)
    with pytest.raises(ValueError, match="does not fit"):
        TinyClipEncoder(width=64, image_size=32, vision_layers=2, trained_in=path)
    with pytest.raises(UserError, match="there is no checkpoint"):
        TinyClipEncoder(width=64, trained_in=str(tmp_path / "absent.ckpt"))


def encoder(compile_towers: bool) -> TinyClipEncoder:
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1, compile_towers=compile_towers)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.filterwarnings("ignore")  # deprecations in torch's compiler
def test_compiled_towers_have_the_same_features_and_gradients():
    found = []
    for compiled in (False, True):
        made = encoder(compiled)
        text, video = (
            made.encode_text(["a cat", "two dogs run", "rain"], 12),
            made.encode_video(random_media(), patches=True),
        )
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
@pytest.mark.filterwarnings("ignore")  # deprecations in torch's compiler
def test_towers_run_uncompiled_if_compiling_fails(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "a-compiler-that-is-not-there"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        made = encoder(True)
        video = made.encode_video(random_media())
    torch._dynamo.reset()
    torch.testing.assert_close(video.frames, encoder(False).encode_video(random_media()).frames)
    made.encode_text(["a cat"], 12)
    (line,) = [record.message for record in caplog.records if "compile_towers" in record.message]
    assert re.fullmatch(r"compile_towers: torch\.compile failed \(.*the towers run uncompiled", line)


def outputs(encoder):
    text = encoder.encode_text(["a red ball", "a blue box"], 8)
    video = encoder.encode_video(random_media(), patches=True)
    return [text.sentence, text.words, video.frames, video.patches]


def shard(rank):
    """Compute with sharded units as before torch 2.13, whose FSDP2 failed on GPUs in calls without arguments."""
    plain = FSDPState._root_pre_forward

    def failing(self, module, arguments, options):
        assert arguments or options
        return plain(self, module, arguments, options)

    FSDPState._root_pre_forward = failing
    warnings.simplefilter("error")
    torch.manual_seed(0)
    encoder, temperature = TinyClipEncoder(width=64, image_size=32), Temperature(2.0)
    fingerprint, expected = encoder.fingerprint(), [tensor.detach() for tensor in outputs(encoder)]
    shard_method(torch.nn.ModuleList([encoder, temperature]), init_device_mesh("cpu", (2,)))
    sharded = outputs(encoder)
    equal = all(torch.equal(found, wanted) for found, wanted in zip(sharded, expected, strict=True))
    sum(tensor.square().mean() for tensor in sharded).backward()
    complete = all(parameter.grad is not None for parameter in encoder.parameters())
    temperature.clamp()
    temperature().backward()
    return [equal, complete, encoder.fingerprint() == fingerprint, temperature.logit_scale.grad.full_tensor().item()]


def test_sharded_units_compute_and_train_as_whole_ones():
    for *kept, gradient in run_processes(shard, 2):
        assert kept == [True] * 3
        assert gradient == pytest.approx(math.exp(2.0))
