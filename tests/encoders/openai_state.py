"""Encoders with the weights of a state dict with OpenAI's names, in any size."""

from tvr_lightning.encoders import OpenClipEncoder
from tvr_lightning.encoders.clip import build_model, openai_configuration
from tvr_lightning.encoders.weights import load_weights


def openai_encoder(tensors, encoder_precision="float32", **switches):
    model = build_model(openai_configuration(tensors), encoder_precision)
    load_weights(model, tensors, "the state dict")
    return OpenClipEncoder(model, "openai-state-dict", encoder_precision=encoder_precision, **switches)
