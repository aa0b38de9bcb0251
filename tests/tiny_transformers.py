"""Tiny random models of transformers with small vocabularies, saved as their users save them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

XCLIP = "mteb.models.model_implementations.xclip_models.XCLIPModel"
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "[UNK]",
]  # fmt: skip
WORDS = [
    "a", "red", "blue", "green", "circle", "square", "star", "moves", "left", "right", "up", "down", "grows", "then",
    "on", "the", "plain", "background",
]  # fmt: skip
OTHERS = [*"0123456789", ".", "<", ">", "seconds", "system", "user", "assistant", "find", "video", "yes", "no"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %} <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "rope_parameters": ROPE,
}  # fmt: skip
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}


def captions_tokenizer(captions: Iterable[str]) -> tuple[Any, int]:
    """Return a tokenizer of the words of captions between a start and an end token, and the size of its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<start>", "<end>", "[UNK]", *sorted({word for text in captions for word in text.split()})]
    words = Tokenizer(models.WordLevel({name: row for row, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="[UNK]", model_max_length=16
    )
    return tokenizer, len(names)


def _qwen_tokenizer(names: list[str], **options: Any) -> Any:
    """Return a tokenizer of Qwen-VL's special tokens and other names; digits are separate tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: index for index, name in enumerate([*SPECIAL, *names])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    parts = [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    words.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:7], **options,
    )  # fmt: skip


def _qwen_config(kind: Any, tokenizer: Any, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    names = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    text_config = {**QWEN_TEXT, "vocab_size": len(tokenizer), **text}
    return kind(text_config=text_config, vision_config={**QWEN_VISION, **vision}, **names)


def _save(kind: Any, config: Any, processor: Any, folder: Path, deviation: float) -> None:
    """Save a model with seeded weights and its processor.

    With the usual deviation of 0.02, outputs would hardly depend on the video.
    """
    torch.manual_seed(1)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and not name.endswith("bias"):
                parameter.normal_(0.0, deviation)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def save_tiny_captioner(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Write a Qwen2.5-VL into `folder`."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = _qwen_tokenizer(WORDS)
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    images, videos = Qwen2VLImageProcessor(size=pixels), Qwen2VLVideoProcessor(size=pixels)
    processor = Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=template)
    config = _qwen_config(Qwen2_5_VLConfig, tokenizer, {}, {"fullatt_block_indexes": [1]})
    _save(Qwen2_5_VLForConditionalGeneration, config, processor, folder, 0.3)
    return folder


def _save_qwen3_vl(kind: Any, folder: Path, deviation: float) -> Any:
    """Write a Qwen3-VL into `folder`, and return its tokenizer."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer = _qwen_tokenizer([*WORDS, *OTHERS], model_max_length=8192)
    images = Qwen2VLImageProcessor(size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64}, patch_size=16)
    videos = Qwen3VLVideoProcessor(size={"shortest_edge": 2 * 32 * 32, "longest_edge": 64 * 64 * 8})
    processor = Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)
    text, vision = {"head_dim": 16, "max_position_embeddings": 8192}, {"deepstack_visual_indexes": [0]}
    config = _qwen_config(Qwen3VLConfig, tokenizer, text, vision | {"num_position_embeddings": 64, "patch_size": 16})
    _save(kind, config, processor, folder, deviation)
    return tokenizer


def save_tiny_reranker(folder: Path) -> Path:
    """Write a CrossEncoder whose score is the logit of yes minus that of no."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = _save_qwen3_vl(Qwen3VLForConditionalGeneration, folder / "model", 0.3)
    chat = {"chat_template": {"add_generation_prompt": True}}
    transformer = Transformer(str(folder / "model"), transformer_task="any-to-any", processing_kwargs=chat)
    modules = [transformer, LogitScore(*tokenizer.convert_tokens_to_ids(["yes", "no"]))]
    CrossEncoder(modules=modules, device="cpu").save(str(folder / "reranker"))
    return folder / "reranker"


def save_tiny_embedder(folder: Path, pooling: bool = True) -> Path:
    """Write an encoder of texts and videos; without `pooling`, it gives a vector per token."""
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import Qwen3VLModel

    _save_qwen3_vl(Qwen3VLModel, folder / "transformers", 0.2)
    transformer = Transformer(str(folder / "transformers"))
    modules = [Pooling(32, pooling_mode="lasttoken"), Normalize()] if pooling else [Normalize("token_embeddings")]
    kind = SentenceTransformer if pooling else MultiVectorEncoder
    prompts = {"query": "find a video", "document": "background"}
    kind(modules=[transformer, *modules], prompts=prompts).save(str(folder / "model"))
    return folder / "model"


def save_tiny_xclip(folder: Path, captions: Iterable[str]) -> None:
    """Write an X-CLIP with a tokenizer for the words of some captions, which MTEB's wrapper loads from a folder."""
    from transformers import VideoMAEImageProcessor, XCLIPConfig, XCLIPModel, XCLIPProcessor

    tokenizer, vocabulary = captions_tokenizer(captions)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": vocabulary, "max_position_embeddings": 16, "eos_token_id": 2, "pad_token_id": 0}
    mit = {"mit_hidden_size": 32, "mit_intermediate_size": 48, "mit_num_hidden_layers": 1, "mit_num_attention_heads": 2}
    vision = {**tower, "image_size": 32, "patch_size": 8, "num_frames": 8, **mit}
    config = XCLIPConfig(
        text_config=text, vision_config=vision, projection_dim=32, prompt_layers=1, prompt_num_attention_heads=2
    )
    torch.manual_seed(0)
    XCLIPModel(config).save_pretrained(folder)
    images = VideoMAEImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    XCLIPProcessor(images, tokenizer).save_pretrained(folder)
