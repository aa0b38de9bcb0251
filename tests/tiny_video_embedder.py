"""A random Qwen3-VL of a few thousand weights with a small vocabulary, which embeds texts and videos."""

from pathlib import Path

from tiny_transformers import WORDS, qwen_tokenizer, save_random

TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %} <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
DIGITS = [*"0123456789", ".", "<", ">", "seconds", "system", "user", "assistant", "find", "video"]


def save_tiny_embedder(folder: Path, pooling: bool = True) -> Path:
    """Write a model with seeded weights into `folder`; without `pooling`, one that gives a vector per token."""
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLModel,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    # Digits alone, so that every time has its own tokens.
    tokenizer, vocabulary = qwen_tokenizer([*WORDS, *DIGITS], digits=True, model_max_length=8192)
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64}, patch_size=16, merge_size=2
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size={"shortest_edge": 2 * 32 * 32, "longest_edge": 64 * 64 * 8}),
        chat_template=TEMPLATE,
    )
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(vocabulary), "bos_token_id": None,
            "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 64, "patch_size": 16,
        },
        image_token_id=vocabulary["<|image_pad|>"], video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"], vision_end_token_id=vocabulary["<|vision_end|>"],
    )  # fmt: skip
    save_random(Qwen3VLModel, config, processor, folder / "transformers", 0.2)
    prompts = {"query": "find a video", "document": "background"}
    transformer = Transformer(str(folder / "transformers"))
    if pooling:
        modules = [transformer, Pooling(32, pooling_mode="lasttoken"), Normalize()]
        SentenceTransformer(modules=modules, prompts=prompts).save(str(folder / "model"))
    else:
        MultiVectorEncoder(modules=[transformer, Normalize("token_embeddings")], prompts=prompts).save(
            str(folder / "model")
        )
    return folder / "model"
