"""Parts of the tiny random models of transformers that tests save: their tokenizers and their weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "[UNK]",
]  # fmt: skip
WORDS = [
    "a", "red", "blue", "green", "circle", "square", "star", "moves", "left", "right", "up", "down", "grows", "then",
    "on", "the", "plain", "background",
]  # fmt: skip


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


def qwen_tokenizer(names: list[str], digits: bool = False, **options: Any) -> tuple[Any, dict[str, int]]:
    """Return a tokenizer of Qwen-VL's special tokens and other names, and its vocabulary; `digits` separates digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: index for index, name in enumerate([*SPECIAL, *names])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    parts = [pre_tokenizers.Whitespace(), *([pre_tokenizers.Digits(individual_digits=True)] if digits else [])]
    words.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:7], **options,
    )  # fmt: skip
    return tokenizer, vocabulary


def save_random(kind: Any, config: Any, processor: Any, folder: Path, deviation: float) -> None:
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
