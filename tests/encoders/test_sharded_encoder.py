"""The encoder under FSDP2, as two processes shard it."""

import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.testing import run_processes


def outputs(encoder):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (2, 3, 3, 32, 32), dtype=torch.uint8, generator=generator)
    text = encoder.encode_text(["a red ball", "a blue box"], 8)
    video = encoder.encode_video(Media(pixels, torch.ones(2, 3, dtype=torch.bool)), patches=True)
    return [text.sentence, text.words, video.frames, video.patches]


def shard(rank):
    warnings.simplefilter("error")
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32)
    fingerprint, expected = encoder.fingerprint(), [tensor.detach() for tensor in outputs(encoder)]
    mesh = init_device_mesh("cpu", (2,))
    for block in [*encoder.clip.transformer.resblocks, *encoder.clip.visual.transformer.resblocks]:
        fully_shard(block, mesh=mesh)
    fully_shard(encoder, mesh=mesh)
    for method in ("encode_text", "encode_video"):
        register_fsdp_forward_method(encoder, method)
    sharded = outputs(encoder)
    equal = all(torch.equal(found, wanted) for found, wanted in zip(sharded, expected, strict=True))
    sum(tensor.square().mean() for tensor in sharded).backward()
    complete = all(parameter.grad is not None for parameter in encoder.parameters())
    return [equal, complete, encoder.fingerprint() == fingerprint]


def test_a_sharded_encoder_gives_the_same_features_and_fingerprint():
    assert run_processes(shard, 2) == [[True, True, True]] * 2
