"""Every kind of tower: weights that open_clip saved give open_clip's own features, of frames of any size."""

import open_clip
import pytest
import torch
from PIL import Image
from small_towers import CAPTIONS, KINDS, WIDTH, save_model

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import ClipEncoder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("models"), {}

    def model(kind: str) -> str:
        if kind not in made:
            made[kind] = save_model(kind, root / kind)
        return made[kind]

    return model


def pictures(width: int, height: int, count: int = 3) -> list[Image.Image]:
    pixels = torch.rand(count, height // 4 + 1, width // 4 + 1, 3, generator=torch.Generator().manual_seed(width))
    return [Image.fromarray((255 * page).byte().numpy()).resize((width, height)) for page in pixels]


def media(encoder, images: list[Image.Image]) -> Media:
    frames = [torch.frombuffer(bytearray(encoder.preparation(image).tobytes()), dtype=torch.uint8) for image in images]
    size = encoder.image_size
    pixels = torch.stack(frames).view(1, len(images), size, size, 3).permute(0, 1, 4, 2, 3)
    return Media(pixels, torch.ones(1, len(images), dtype=torch.bool))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_features_are_open_clips_own(models, kind):
    name = models(kind)
    model, _, prepare = open_clip.create_model_and_transforms(name, pretrained_text=False)
    model.eval()
    encoder = ClipEncoder(name, "folder").eval()
    options = {"normalize": False} if kind == "coca" else {}
    for size in ((53, 37), (37, 71), (90, 51)):
        images = pictures(*size)
        expected = model.encode_image(torch.stack([prepare(image) for image in images]), **options)
        found = encoder.encode_video(media(encoder, images))
        torch.testing.assert_close(found.frames[0], expected, rtol=1e-5, atol=1e-5)
        assert expected.std(dim=0).mean() > 3e-4  # other frames, other features
    ids = open_clip.get_tokenizer(name)(CAPTIONS, context_length=encoder.context_length)
    text = encoder.encode_text(CAPTIONS, encoder.context_length)
    expected = model.encode_text(ids, **options)
    torch.testing.assert_close(text.sentence, expected, rtol=1e-5, atol=1e-5)
    assert expected.std(dim=0).mean() > 3e-4
    assert text.words.shape == (len(CAPTIONS), encoder.context_length, WIDTH)
    assert text.word_mask.sum(1).min() > 4
    assert encoder.initial_logit_scale() == pytest.approx(model.logit_scale.item())
    bias = 0 if model.logit_bias is None else model.logit_bias.item()
    assert encoder.initial_logit_bias() == pytest.approx(bias)
    assert not [name for name, _ in encoder.named_parameters() if "logit" in name or "decoder" in name]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_patch_is_what_the_head_makes_of_one_position(models, kind):
    encoder = ClipEncoder(models(kind), "folder").eval()
    images = media(encoder, pictures(48, 40))
    video, plain = encoder.encode_video(images, patches=True), encoder.encode_video(images)
    torch.testing.assert_close(video.frames, plain.frames, rtol=1e-5, atol=1e-6)
    cells = {"resnet": 4, "convnext": 1, "mobileclip": 9}.get(kind, 16)
    assert video.patches.shape == (1, 3, cells, WIDTH)
    assert torch.isfinite(video.patches).all()
    if cells == 1:
        torch.testing.assert_close(video.patches[:, :, 0], video.frames, rtol=1e-5, atol=1e-5)
    if kind in ("gap", "swin", "mobileclip"):  # an average before a linear head
        torch.testing.assert_close(video.patches.mean(2), video.frames, rtol=1e-4, atol=1e-5)
    if cells > 1:
        assert video.patches.std(dim=2).mean() > 1e-3
