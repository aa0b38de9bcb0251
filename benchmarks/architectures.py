"""Check all architectures of open_clip: build each one with random weights, and compute frames, patches, and words.

    python benchmarks/architectures.py --write docs/encoders.md

Architectures up to `--largest` million parameters run, and their frames and sentences are compared with open_clip's own
`encode_image` and `encode_text`; larger ones are built on PyTorch's meta device, which follows shapes and has no
values. Nothing is downloaded: if open_clip names a tokenizer or a text tower on the Hugging Face Hub, a random one
replaces it, and the table states this.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvr_lightning  # noqa: F401  first, see tvr_lightning._torchvision

# isort: split
import open_clip
import torch
from open_clip.hf_model import HFTextEncoder
from torch import nn

from tvr_lightning.encoders.clip import build_model
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.pretrained import find_weights
from tvr_lightning.encoders.tokenizer import build_tokenizer

BEGIN, END = "<!-- architectures: written by benchmarks/architectures.py -->", "<!-- end of architectures -->"
CAPTIONS = ["a red ball rolls to the left", "two dogs"]
AGREES = 1e-4
# The sizes of the text towers as their papers and configurations publish them.
TEXT_TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta-base": ("roberta", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "xlm-roberta-base": ("xlm-roberta", {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "xlm-roberta-large": (
        "xlm-roberta",
        {
            "vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1, "hidden_size": 1024,
            "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        },
    ),
    "google/mt5-base": (
        "mt5", {"vocab_size": 250112, "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "d_kv": 64},
    ),
    "google/mt5-xl": (
        "mt5", {"vocab_size": 250112, "d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32, "d_kv": 64},
    ),
    "facebook/nllb-200-distilled-600M": (
        "m2m_100", {"vocab_size": 256206, "encoder_layers": 12, "decoder_layers": 12, "max_position_embeddings": 1024},
    ),
    "facebook/nllb-200-distilled-1.3B": (
        "m2m_100",
        {
            "vocab_size": 256206, "encoder_layers": 24, "decoder_layers": 24, "encoder_ffn_dim": 8192,
            "decoder_ffn_dim": 8192, "max_position_embeddings": 1024,
        },
    ),
}  # fmt: skip


@dataclass
class Line:
    """Results for one architecture."""

    name: str
    image: str
    text: str
    frames: str = ""
    words: int = 0
    dimension: int = 0
    patches: int = 0
    millions: float = 0.0
    seen: str = ""

    def row(self) -> str:
        """Return a row of the table."""
        sizes = [self.frames, self.words, self.dimension, self.patches, f"{self.millions:,.0f} M"]
        cells = [f"`{self.name}`", self.image, self.text, *map(str, sizes), self.seen]
        return f"| {' | '.join(cells)} |"


def stand_in_tokenizer(folder: Path, pad_id: int) -> Path:
    """Save a tokenizer of a few words, which pads with the padding ID of the text tower."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["</s>", "<unk>"]
    special.insert(pad_id, "<pad>")
    names = [*special, *sorted({word for caption in CAPTIONS for word in caption.split()})]
    words = Tokenizer(models.WordLevel({name: row for row, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", names.index("</s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", sep_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def stand_in_text_tower(name: str, folder: Path) -> tuple[str, int]:
    """Save the configuration of a text tower of the published size; return its folder and its padding ID."""
    from transformers import AutoConfig

    kind, sizes = TEXT_TOWERS[name]
    configuration = AutoConfig.for_model(kind, **sizes)
    configuration.save_pretrained(folder)
    return str(folder), int(configuration.pad_token_id)


def build(configuration: dict[str, Any], on_meta: bool) -> nn.Module:
    """Build a model. On the meta device, only the logit scale and bias have values, which are read immediately."""
    if not on_meta:
        return build_model(configuration, "float32")
    with torch.device("meta"):
        model: Any = build_model(configuration, "float32")
    for part in ("logit_scale", "logit_bias"):
        if getattr(model, part) is not None:
            setattr(model, part, nn.Parameter(torch.zeros(())))
    if isinstance(getattr(model, "text", None), HFTextEncoder):
        from transformers import masking_utils

        masking_utils.is_tracing = lambda *arguments: True  # otherwise it would read the values of the mask
    return model


@torch.no_grad()
def look(name: str, largest: float, folder: Path) -> Line:
    """Build one architecture, and compute features with it."""
    configuration = dict(open_clip.get_model_config(name))
    text = dict(configuration["text_cfg"])
    vision = configuration["vision_cfg"]
    image = vision.get("timm_model_name") or ("ResNet" if isinstance(vision["layers"], list) else "ViT")
    line = Line(name, f"timm {image}" if "timm_model_name" in vision else f"CLIP {image}", "CLIP")
    stands_in, pad_id = [], 0
    if "multimodal_cfg" in configuration:
        line.text = "CoCa"
    if text.get("hf_tokenizer_name"):
        line.text = f"{line.text}, {text['hf_tokenizer_name']}"
        stands_in.append("tokenizer")
    if text.get("hf_model_name"):
        line.text = f"transformers, {text['hf_model_name']}"
        text["hf_model_name"], pad_id = stand_in_text_tower(text["hf_model_name"], folder / "text")
        stands_in.append("text configuration")
    configuration["text_cfg"] = text
    shapes = build(configuration, on_meta=True)
    line.millions = sum(p.numel() for p in shapes.parameters()) / 1e6
    runs = line.millions <= largest
    model = build(configuration, on_meta=False) if runs else shapes
    if text.get("hf_tokenizer_name"):
        text["hf_tokenizer_name"] = str(stand_in_tokenizer(folder / "words", pad_id))
    tokenizer = build_tokenizer(text)
    encoder = OpenClipEncoder(model, name, find_weights(name, None).pixels, tokenizer).eval()
    tokens = tokenizer.encode(CAPTIONS, encoder.context_length)
    ids, mask = tokens.ids, tokens.mask
    pixels = torch.randn(1, 2, 3, encoder.image_size, encoder.image_size)
    if not runs:
        encoder, ids, mask, pixels = encoder.to("meta"), ids.to("meta"), mask.to("meta"), pixels.to("meta")
    video = encoder.encode_pixels(pixels, torch.ones(1, 2, device=pixels.device), patches=True)
    found = encoder.encode_tokens(ids, mask)
    assert video.patches is not None
    assert found.words.shape == (2, encoder.context_length, encoder.dimension)
    line.frames = f"{encoder.image_size} {encoder.interpolation} {encoder.resize_mode}"
    line.words, line.dimension, line.patches = encoder.context_length, encoder.dimension, video.patches.shape[2]
    line.seen = "shapes"
    if runs:
        clip: Any = encoder.clip
        own = clip.visual(pixels[0]), (clip.encode_text(ids) if isinstance(clip, open_clip.CLIP) else clip.text(ids))
        first = [part[0] if isinstance(part, tuple) else part for part in own]
        apart = max((video.frames[0] - first[0]).abs().max(), (found.sentence - first[1]).abs().max())
        assert apart < AGREES, f"{name}: differs from open_clip by {apart}"
        line.seen = "runs, equal"
    if stands_in:
        line.seen += f"; stand-in {' and '.join(stands_in)}"
    return line


def lines(largest: float) -> Iterator[Line]:
    """Yield a line per architecture of open_clip; a failure becomes a line with its reason."""
    for name in open_clip.list_models():
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield look(name, largest, Path(folder))
            except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
                yield Line(name, "", "", seen=f"refused: {' '.join(str(error).split())[:120]}")


def table(found: list[Line], largest: float) -> str:
    """Return the part of the page between the markers."""
    names = ["architecture", "image", "text", "frames", "words", "D", "patches", "parameters", "checked"]
    head = (
        f"open_clip {open_clip.__version__} lists {len(found)} architectures; "
        f"{sum('refused' not in line.seen for line in found)} work, patches included. Architectures up to "
        f"{largest:g} million parameters ran with random weights, and their frames and sentences equal open_clip's to "
        '1e-4 ("runs, equal"). For larger ones, only the shapes were checked. A stand-in is a generated tokenizer or '
        "text configuration, used because open_clip's repository on the Hub was not available."
    )
    rows = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *(line.row() for line in found)]
    return "\n".join([BEGIN, "", head, "", *rows, "", END])


def main() -> None:
    """Check all architectures, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=float, default=400.0, help="million parameters up to which models run")
    parser.add_argument("--write", type=Path, help="page in which to replace the table; default: print it")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = []
    for line in lines(options.largest):
        print(line.row(), file=sys.stderr, flush=True)
        found.append(line)
    made = table(found, options.largest)
    if options.write is None:
        print(made)
        return
    page = options.write.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    options.write.write_text(before + made + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
