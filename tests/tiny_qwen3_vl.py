"""A random Qwen3-VL of a few thousand weights with a small vocabulary, saved like models of transformers."""

from pathlib import Path

from tiny_transformers import WORDS, qwen_tokenizer, save_random

TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% for c in m['content'] %}{% if c['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %} <|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def save_tiny_qwen3_vl(folder: Path) -> dict[str, int]:
    """Write config, seeded weights, processor, and tokenizer into `folder`, and return the vocabulary."""
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer, vocabulary = qwen_tokenizer([*WORDS, "yes", "no", *"0123456789", "<", ".", "seconds", ">"])
    pixels = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64 * 8}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, patch_size=16),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=pixels),
        chat_template=TEMPLATE,
    )
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(vocabulary), "bos_token_id": None,
            "eos_token_id": 2, "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
            "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=vocabulary["<|image_pad|>"], video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"], vision_end_token_id=vocabulary["<|vision_end|>"],
    )  # fmt: skip
    save_random(Qwen3VLForConditionalGeneration, config, processor, folder, 0.3)
    return vocabulary


def save_tiny_reranker(folder: Path) -> Path:
    """Write a CrossEncoder whose score is the logit of yes minus that of no."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    vocabulary = save_tiny_qwen3_vl(folder / "model")
    chat = {"chat_template": {"add_generation_prompt": True}}
    transformer = Transformer(str(folder / "model"), transformer_task="any-to-any", processing_kwargs=chat)
    modules = [transformer, LogitScore(vocabulary["yes"], vocabulary["no"])]
    CrossEncoder(modules=modules, device="cpu").save(str(folder / "reranker"))
    return folder / "reranker"
