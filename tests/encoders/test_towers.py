"""Every kind of tower gives the features of open_clip, for frames of any size."""

import json
import logging

import open_clip
import pytest
import torch
from encoders.parts import patterns
from PIL import Image
from small_towers import CAPTIONS, KINDS, WIDTH

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import ClipEncoder


def pictures(width: int, height: int) -> list[Image.Image]:
    pixels = torch.rand(3, height // 4 + 1, width // 4 + 1, 3, generator=torch.Generator().manual_seed(width))
    return [Image.fromarray((255 * page).byte().numpy()).resize((width, height)) for page in pixels]


def media(encoder, images: list[Image.Image]) -> Media:
    frames = [torch.frombuffer(bytearray(encoder.preparation(image).tobytes()), dtype=torch.uint8) for image in images]
    size = encoder.image_size
    pixels = torch.stack(frames).view(1, len(images), size, size, 3).permute(0, 1, 4, 2, 3)
    return Media(pixels, torch.ones(1, len(images), dtype=torch.bool))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_features_equal_those_of_open_clip(models, kind):
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
        assert expected.std(dim=0).mean() > 3e-4  # features differ between frames
    captions = [*CAPTIONS, "a dog"]  # the last one is padded in every vocabulary
    ids = open_clip.get_tokenizer(name)(captions, context_length=encoder.context_length)
    text = encoder.encode_text(captions, encoder.context_length)
    expected = model.encode_text(ids, **options)
    torch.testing.assert_close(text.sentence, expected, rtol=1e-5, atol=1e-5)
    assert expected.std(dim=0).mean() > 3e-4
    assert text.words.shape == (len(captions), encoder.context_length, WIDTH)
    assert text.word_mask.sum(1)[:-1].min() > 4
    assert encoder.initial_logit_scale() == pytest.approx(model.logit_scale.item())
    bias = 0 if model.logit_bias is None else model.logit_bias.item()
    assert encoder.initial_logit_bias() == pytest.approx(bias)
    assert not [name for name, _ in encoder.named_parameters() if "logit" in name or "decoder" in name]

    video = encoder.encode_video(media(encoder, images), patches=True)
    torch.testing.assert_close(video.frames, found.frames, rtol=1e-5, atol=1e-6)
    cells = {"resnet": 4, "convnext": 1, "mobileclip": 9}.get(kind, 16)
    assert video.patches.shape == (1, 3, cells, WIDTH)
    assert torch.isfinite(video.patches).all()
    if cells > 1:
        assert video.patches.std(dim=2).mean() > 1e-3
    if kind in ("gap", "swin", "mobileclip", "convnext"):  # an average before a linear head, or a single patch
        torch.testing.assert_close(video.patches.mean(2), video.frames, rtol=1e-4, atol=1e-5)


STEMS = {"conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "patch_embed", "stem"}
IN_FRONT = {
    "positional_embedding", "token_embedding", "class_embedding", "ln_pre", "cls_emb", "cls_token", "pos_embed",
    "norm_pre", "embeddings", "embed_tokens", "embed_positions",
}  # fmt: skip
BLOCKS = {"resblocks", "blocks", "stages", "layers", "layer", "block", "layer1", "layer4"}


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_of_recipes_match_the_corresponding_layers(models, kind):
    encoder = ClipEncoder(models(kind), "folder")
    everything = dict(encoder.clip.named_parameters())

    def frozen() -> set[str]:
        return {name for name, parameter in everything.items() if not parameter.requires_grad}

    patterns("gare").apply(encoder)
    stem = frozen()
    assert stem
    assert all(name.startswith("visual.") and STEMS & set(name.split(".")) for name in stem)
    encoder.requires_grad_(True)
    patterns("clip4clip").apply(encoder)
    assert stem < frozen()
    assert all(name in stem or IN_FRONT & set(name.split(".")) for name in frozen())
    trained = set(everything) - frozen()
    assert not [name for name in trained if IN_FRONT & set(name.removeprefix("visual.attnpool.").split("."))]
    assert all(any(BLOCKS & set(n.split(".")) and n.startswith("visual.") == v for n in trained) for v in (True, False))


@pytest.mark.parametrize("kind", ["clip", "siglip2", "coca", "xlm-roberta"])
def test_gradients_reach_trained_weights_and_checkpointing_saves_memory(models, kind):
    found, saved = [], [0, 0]
    for checkpointing in (False, True):
        encoder = ClipEncoder(models(kind), "folder", gradient_checkpointing=checkpointing).train()
        patterns("clip4clip").apply(encoder)
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        images = media(encoder, pictures(48, 40))

        def pack(tensor, checkpointing=checkpointing):
            saved[checkpointing] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            text, video = encoder.encode_text(CAPTIONS, 12), encoder.encode_video(images, patches=True)
        (text.sentence.square().sum() + text.words.square().sum() + video.frames.sum() + video.patches.sum()).backward()
        missing = [n for n, p in encoder.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing
        found.append([p.grad for p in encoder.parameters() if p.grad is not None])
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-4, atol=1e-4)
    assert saved[True] < saved[False] / (2 if kind == "clip" else 1)


@torch.no_grad()
def test_fewer_words_can_be_encoded(models):
    masked = [(kind, False) for kind in ("clip", "siglip", "clipa", "coca", "worldwide", "xlm-roberta")]
    for kind, text_mask in [*masked, ("clip", True)]:
        encoder = ClipEncoder(models(kind), "folder", text_mask=text_mask).eval()
        short, long = encoder.encode_text(["two dogs"], 9), encoder.encode_text(["two dogs"], encoder.context_length)
        assert short.words.shape[1] == 9
        torch.testing.assert_close(short.sentence, long.sentence, rtol=1e-4, atol=1e-5)
        mask = short.word_mask[0]
        assert 0 < mask.sum() < 9
        torch.testing.assert_close(short.words[0][mask], long.words[0][:9][mask], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_text_mask_hides_padding(models):
    for kind in ("clip", "siglip", "clipa", "coca", "mobileclip"):
        hidden, seen = (ClipEncoder(models(kind), "folder", text_mask=mask).eval() for mask in (True, False))
        tokens = hidden.tokenizer.encode(["two dogs"], 12)
        ids, mask = tokens.ids, tokens.mask
        other = torch.where(mask, ids, ids.new_tensor(7))
        causal = kind in ("clip", "coca")
        for encoder in (hidden, seen):
            apart = encoder.encode_tokens(ids, mask).words - encoder.encode_tokens(other, mask).words
            assert (apart[mask].abs().max() < 1e-6) == (encoder is hidden or causal)


def test_captions_are_truncated_to_the_context_length_with_one_notice(models, caplog):
    encoder = ClipEncoder(models("pe"), "folder")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert encoder.encode_text(CAPTIONS, 77).words.shape[1] == 12
        assert encoder.positions(8) == 8
    said = [record.message for record in caplog.records if "context length" in record.message]
    assert said == [f"words is 77, but {models('pe')} has a context length of 12. Captions are truncated to it."]


@pytest.mark.parametrize(
    ("kind", "first", "last"), [("siglip", "", "</s>"), ("clipa", "[CLS]", "dogs"), ("xlm-roberta", "<s>", "</s>")]
)
def test_token_ids_equal_those_of_open_clip(models, kind, first, last):
    captions = ["two dogs chase" + " a" * more for more in range(16)]
    tokenizer = ClipEncoder(models(kind), "folder").tokenizer
    expected = open_clip.get_tokenizer(models(kind))(captions, context_length=tokenizer.context_length)
    assert tokenizer.encode(captions, tokenizer.context_length).ids.tolist() == expected.tolist()
    pieces = tokenizer.pieces("two dogs", 20)
    assert len(pieces) + (kind == "clipa") == tokenizer.needed("two dogs")  # CLIPA's separator becomes padding
    assert (pieces[0].startswith(first), pieces[-1].endswith(last)) == (True, True)


def test_frozen_towers_have_no_dropout_and_fixed_batch_norms(models):
    for trained in (False, True):
        encoder = ClipEncoder(models("bert"), "folder").requires_grad_(trained).train()
        before = encoder.configuration()
        first, second = encoder.encode_text(CAPTIONS, 12), encoder.encode_text(CAPTIONS, 12)
        assert torch.equal(first.words, second.words) == (not trained)
        assert encoder.configuration() == before
        resnet = ClipEncoder(models("resnet"), "folder").requires_grad_(trained).train()
        weights = resnet.fingerprint()
        resnet.encode_video(media(resnet, pictures(48, 40)))
        assert (resnet.fingerprint() == weights) == (not trained), "statistics of batch norms do not change"


def test_more_positions_need_a_causal_text_transformer(models):
    for kind in ("siglip", "coca", "bert"):
        with pytest.raises(ValueError, match="needs a causal text transformer with more than 20 learned positions"):
            ClipEncoder(models(kind), "folder", positions=248)


def test_the_configuration_includes_tokenizer_and_preprocessing(models):
    configurations = [ClipEncoder(models(kind), "folder").configuration() for kind in ("siglip", "siglip2", "pe")]
    assert len({json.dumps(found, sort_keys=True) for found in configurations}) == 3
    assert "squash" in configurations[0]["preparation"]
    assert configurations[0]["tokenizer"] != configurations[1]["tokenizer"]
    assert "canonicalize" in configurations[0]["tokenizer"]
    clip = ClipEncoder(models("clip"), "folder").configuration()
    assert not {"text", "vision_heads"} & set(clip)
