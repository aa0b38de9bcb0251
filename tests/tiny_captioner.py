"""A random Qwen2.5-VL of a few thousand weights with a small vocabulary, saved like models of transformers."""

from pathlib import Path

from tiny_transformers import WORDS, qwen_tokenizer, save_random

TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %} <|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def save_tiny_captioner(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Write config, seeded weights, processor, and tokenizer into `folder`."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer, vocabulary = qwen_tokenizer(WORDS)
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=pixels),
        chat_template=template,
    )
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": len(vocabulary), "bos_token_id": None, "eos_token_id": 2,
            "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
            "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
        image_token_id=vocabulary["<|image_pad|>"], video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"], vision_end_token_id=vocabulary["<|vision_end|>"],
    )  # fmt: skip
    save_random(Qwen2_5_VLForConditionalGeneration, config, processor, folder, 0.3)
    return folder
