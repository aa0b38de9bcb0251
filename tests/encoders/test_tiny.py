import pytest
import torch
from torch import nn

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError


def media(size, videos=2, frames=3):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (videos, frames, 3, size, size), dtype=torch.uint8, generator=generator)
    return Media(pixels, torch.ones(videos, frames, dtype=torch.bool))


def test_it_learns_to_match_from_nothing():
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, vision_layers=2)
    captions = [f"a {colour} {shape}" for colour in ("red", "green", "blue", "grey") for shape in ("ball", "box")]
    frames = media(32, videos=8)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)

    def similarity():
        text = nn.functional.normalize(encoder.encode_text(captions, 8).sentence, dim=-1)
        video = nn.functional.normalize(encoder.encode_video(frames).frames.mean(1), dim=-1)
        return text @ video.T / 0.07

    start = nn.functional.cross_entropy(similarity(), torch.arange(8))
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(similarity(), torch.arange(8))
        loss.backward()
        optimizer.step()
    assert loss < start / 4
    assert torch.equal(similarity().argmax(1), torch.arange(8))


def test_it_has_the_shapes_it_says():
    encoder = TinyClipEncoder(width=128, image_size=48, patch_size=16, text_layers=5, context_length=20)
    assert (encoder.dimension, encoder.image_size, encoder.context_length) == (128, 48, 20)
    assert encoder.encode_video(media(48), patches=True).patches.shape == (2, 3, 9, 128)
    assert encoder.encode_text(["a red ball", "a blue box"], 20).words.shape == (2, 20, 128)
    assert len(encoder.temporal_initialization(5).blocks) == 5
    assert len(encoder.clip.visual.transformer.resblocks) == 4


@pytest.mark.parametrize(
    ("switch", "message"), [({"width": 100}, "multiple of 64"), ({"image_size": 50}, "50 must be a multiple")]
)
def test_it_refuses_sizes_that_do_not_divide(switch, message):
    with pytest.raises(ValueError, match=message):
        TinyClipEncoder(**switch)


def test_it_starts_with_the_encoder_of_a_run(tmp_path):
    trained = TinyClipEncoder(width=64, image_size=32, vision_layers=1)
    state = {f"encoder.{name}": value for name, value in trained.state_dict().items()}
    torch.save({"state_dict": state | {"head.weight": torch.ones(2)}}, tmp_path / "last.ckpt")
    path = str(tmp_path / "last.ckpt")
    started = TinyClipEncoder(width=64, image_size=32, vision_layers=1, trained_in=path)
    assert started.fingerprint() == trained.fingerprint()
    with pytest.raises(ValueError, match="does not fit"):
        TinyClipEncoder(width=64, image_size=32, vision_layers=2, trained_in=path)
    with pytest.raises(UserError, match="there is no checkpoint"):
        TinyClipEncoder(width=64, trained_in=str(tmp_path / "absent.ckpt"))
