"""Parts of the tiny random models of transformers that tests save: their tokenizer and their weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


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
