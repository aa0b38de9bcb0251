"""Encoders with the weights of a state dict with OpenAI's names, in any size."""

from tvr_lightning.encoders import OpenClipEncoder
from tvr_lightning.encoders.clip import build_model, openai_sizes
from tvr_lightning.encoders.weights import load_weights


def openai_encoder(tensors, encoder_precision="float32", **switches):
    dimension, width, layers, patch, side, text_width, text_layers, context, vocabulary = openai_sizes(tensors).values()
    vision = {"width": width, "layers": layers, "patch_size": patch, "image_size": side, "head_width": min(64, width)}
    text = {"width": text_width, "layers": text_layers, "context_length": context, "vocab_size": vocabulary}
    text["heads"] = max(1, text_width // 64)
    configuration = {"embed_dim": dimension, "quick_gelu": True, "vision_cfg": vision, "text_cfg": text}
    model = build_model(configuration, encoder_precision)
    load_weights(model, tensors, "the state dict")
    return OpenClipEncoder(model, "openai-state-dict", encoder_precision=encoder_precision, **switches)
