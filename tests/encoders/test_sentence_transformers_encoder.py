"""Models of sentence-transformers give the same embeddings of captions and frames as the library."""

from pathlib import Path

import pytest
import torch
from encoders.parts import random_media
from tiny_transformers import captions_tokenizer, save_tiny_captioner

from tvr_lightning.encoders import LoRA, MissingWeightsError, SentenceTransformersEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.methods import CLIP4Clip

sentence_transformers = pytest.importorskip("sentence_transformers")
CAPTIONS = ["a red circle moves left then up", "star"]


def save_clip(folder: Path) -> None:
    """Save a small random CLIP as transformers does."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    tokenizer, vocabulary = captions_tokenizer(CAPTIONS)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": vocabulary, "max_position_embeddings": 16, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders of a CLIP, and of a vision-language model with prompts, pooling, and normalization."""
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    root = tmp_path_factory.mktemp("models")
    save_clip(root / "clip")
    save_tiny_captioner(root / "captioner")
    modules = [Transformer(str(root / "captioner")), Pooling(32, pooling_mode="lasttoken"), Normalize()]
    prompts = {"query": "on the plain", "document": "background"}
    sentence_transformers.SentenceTransformer(modules=modules, prompts=prompts).save(str(root / "vlm"))
    return {name: str(root / name) for name in ("clip", "vlm")}


SIZES = {"clip": 32, "vlm": 56}


def build(models: dict[str, str], kind: str) -> SentenceTransformersEncoder:
    return SentenceTransformersEncoder(models[kind], image_size=SIZES[kind], input="frames")


@pytest.mark.parametrize("kind", SIZES)
@torch.no_grad()
def test_features_equal_those_of_the_library(models, kind):
    encoder, theirs = build(models, kind).eval(), sentence_transformers.SentenceTransformer(models[kind], device="cpu")
    text = encoder.encode_text(CAPTIONS, 12)
    torch.testing.assert_close(text.sentence, theirs.encode_query(CAPTIONS, convert_to_tensor=True).cpu())
    frames = random_media(SIZES[kind])
    images = list(frames.pixels.flatten(0, 1).permute(0, 2, 3, 1).numpy())
    video = encoder.encode_video(frames)
    expected = theirs.encode_document(images, convert_to_tensor=True).cpu()
    torch.testing.assert_close(video.frames.flatten(0, 1), expected)
    assert torch.equal(video.frame_mask, frames.frame_mask)
    assert (encoder.dimension, *video.frames.shape) == ({"clip": 24, "vlm": 32}[kind], 2, 3, encoder.dimension)
    assert expected.std(dim=0).mean() > 1e-3
    with pytest.raises(UserError, match="gives no patches"):
        encoder.encode_video(frames, patches=True)


@torch.no_grad()
def test_words_are_the_vectors_of_tokens_or_the_sentence(models):
    encoder = build(models, "vlm").eval()
    theirs = sentence_transformers.SentenceTransformer(models["vlm"], device="cpu")
    text = encoder.encode_text(CAPTIONS, 14)
    tokens = theirs.encode_query(CAPTIONS, output_value="token_embeddings")
    assert text.words.shape == (2, 14, 32)
    assert text.word_mask.sum(1).tolist() == [14, len(tokens[1])]
    torch.testing.assert_close(text.words[0], tokens[0][-14:].cpu())
    torch.testing.assert_close(text.words[1][: len(tokens[1])], tokens[1].cpu())
    text = build(models, "clip").eval().encode_text(CAPTIONS, 14)
    assert torch.equal(text.words, text.sentence.unsqueeze(1))
    assert text.word_mask.all()


@pytest.mark.parametrize("kind", SIZES)
def test_both_towers_are_trained_also_with_lora(models, kind):
    for tuning in (None, LoRA(rank=2)):
        method = CLIP4Clip(build(models, kind), tuning=tuning, frames=3, words=8).train()
        before = method.encoder.fingerprint()
        text, video = method.encoder.encode_text(CAPTIONS, 8), method.encoder.encode_video(random_media(SIZES[kind]))
        (text.sentence @ video.frames.mean(1).T).sum().backward()
        trained = [n for n, p in method.encoder.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
        for tower in ("text_model", "vision_model") if kind == "clip" else ("language_model", "visual"):
            assert any(tower in name for name in trained)
        assert not [name for name, p in method.encoder.named_parameters() if "logit" in name and p.requires_grad]
        assert method.encoder.fingerprint() == before
    expected = {"clip": 2.6592, "vlm": torch.log(torch.tensor(100.0)).item()}[kind]
    assert build(models, kind).initial_logit_scale() == pytest.approx(expected, abs=1e-3)


def test_the_fingerprint_includes_prompts_and_sizes(models):
    encoder = build(models, "vlm")
    plain = encoder.fingerprint()
    assert SentenceTransformersEncoder(models["vlm"], image_size=28, input="frames").fingerprint() != plain
    encoder.query_prompt = "a star"
    assert encoder.fingerprint() != plain
    half = SentenceTransformersEncoder(models["vlm"], 56, dtype="bfloat16")
    assert half.encode_text(["a"], 8).words.dtype == torch.float32


def test_models_without_images_files_or_trust_are_refused_before_their_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for create in (SentenceTransformersEncoder, SentenceTransformersEncoder.required_files):
        with pytest.raises(UserError, match=r"does not accept images\. Choose a model for texts and images\.$"):
            create(weights=str(tmp_path))
    with pytest.raises(MissingWeightsError, match=r"missing/model is missing: .* `hf download missing/model`"):
        SentenceTransformersEncoder("missing/model")
    (tmp_path / "preprocessor_config.json").write_text('{"image": 1}')
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "own.Model"}}')
    with pytest.raises(UserError, match="needs code from its repository, which is not run"):
        SentenceTransformersEncoder(str(tmp_path))
